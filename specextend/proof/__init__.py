"""The start that proves its own kernels: each is tried in a process of its own, and taken if it is
right and faster.
"""
