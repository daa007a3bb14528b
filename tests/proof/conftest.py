"""What proofs are about here."""

from specextend.decoding.device import CPU
from specextend.proof.prover import LayerShape, Subject

SUBJECT = Subject(
    device="cpu",
    dtype="float32",
    layers=(LayerShape(num_heads=4, num_key_heads=2, head_dim=64, hidden_size=64, intermediate_size=128),),
    num_drafts=8,
    depth=4,
    chunk=CPU.prefill_chunk,
)
"""Heads that all kernels of a CPU take, in fp32."""
