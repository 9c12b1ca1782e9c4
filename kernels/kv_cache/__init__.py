"""Heads on their way into the paged KV cache: norm, rotation, FP8, storing."""
