"""Decoders in C, which compute all layers, and even several tokens, in one call."""
