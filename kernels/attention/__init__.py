"""Attention over a paged KV cache: in plain torch, in C for CPUs and in Triton."""
