"""Floor 8: the `updraft` command."""
