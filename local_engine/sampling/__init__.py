"""Sampling of tokens from logits, and signals of the model's confidence."""
