"""Proof of a node's kernels at its start: each is tried in a separate process and taken if
right.
"""
