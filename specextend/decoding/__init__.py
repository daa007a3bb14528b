"""Decoding: cache, draft tree, retrieval, sampling, verification and the engine.

`docs/architecture.md` has the letters of shapes.
"""
