"""Writes to the paged KV cache: norm, rotation and FP8 conversion of heads."""
