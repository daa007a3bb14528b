"""Distilling drafts: what they learn from, how they learn it, how well they guess afterwards."""
