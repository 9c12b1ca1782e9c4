"""Decoders in C: all layers, and several tokens, in one call."""
