"""Kernels for a CPU that numba compiles; README.md explains them."""
