"""Distillation of drafts: their examples, their training and their evaluation."""
