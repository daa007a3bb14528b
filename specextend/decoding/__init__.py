"""Decoding: cache, draft tree, retrieval, sampling, verification and the engine."""
