"""Distillation of drafts: their samples, their training and their evaluation."""
