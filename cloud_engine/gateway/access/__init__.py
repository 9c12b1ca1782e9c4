"""Who may use the gateway."""
