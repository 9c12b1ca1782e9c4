"""Heads on their way into the paged KV cache: norm, rotation, storing."""
