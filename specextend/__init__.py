"""Offline summarisation of long documents with SpecExtend decoding."""
