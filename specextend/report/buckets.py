"""Documents by the length of their prompt: a bucket is named after its upper bound, a power of two."""

from __future__ import annotations

SMALLEST = 512


def bucket_of(num_prompt_tokens: int) -> int:
    """Upper bound in tokens: the smallest power of two, 512 or more, that holds the prompt."""
    return max(SMALLEST, 1 << (num_prompt_tokens - 1).bit_length())


def bucket_name(bucket: int) -> str:
    """`512`, `1K`, `2K`, ..."""
    return f"{bucket // 1024}K" if bucket >= 1024 else str(bucket)
