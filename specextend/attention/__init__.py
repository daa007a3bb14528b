"""Attention: one plan per forward pass, interchangeable backends."""
