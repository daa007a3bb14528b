"""Distillation of drafts: examples, training and evaluation."""
