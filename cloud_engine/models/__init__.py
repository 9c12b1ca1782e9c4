"""Model architectures, one page each, over small shared layers."""
