"""Access to the gateway."""
