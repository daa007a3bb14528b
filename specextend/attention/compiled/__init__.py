"""Kernels for a CPU that numba compiles; README.md explains them.

Other packages import only `calls`, and only where numba (extra `cpu`) is installed.
"""
