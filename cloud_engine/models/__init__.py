"""Model architectures: one module per family, built from small shared layers."""
