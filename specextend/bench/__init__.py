"""Benchmarks: comparison of sides, tree sizes, memory of a prefill, and the value of retrieval."""
