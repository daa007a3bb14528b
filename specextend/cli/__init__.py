"""Command lines: one module for each, with its arguments and what they start. Only these print."""
