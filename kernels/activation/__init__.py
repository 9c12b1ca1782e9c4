"""Gated activations of feed-forward layers."""
