"""Speculative decoding: drafters, the choice of draft lengths, and the measurements for this choice."""
