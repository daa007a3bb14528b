"""Attention: one plan per forward pass, interchangeable backends, the hook into transformers."""
