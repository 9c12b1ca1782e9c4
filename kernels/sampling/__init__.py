"""Sampling of tokens from logits: logit edits, truncation, sampling and probabilities."""
