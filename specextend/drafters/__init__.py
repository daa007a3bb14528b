"""Drafters: they propose the trees that the target verifies."""
