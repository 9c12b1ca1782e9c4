"""Layer 8: the `updraft` command."""
