"""Speculative decoding: the drafters, how much they draft, and what was learned from it."""
