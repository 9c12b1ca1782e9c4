"""Conversion of the engine's tokens to the answers that clients see."""
