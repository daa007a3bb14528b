"""Proof of a node's kernels at its start: a separate process tries each before it is taken."""
