"""API keys of the gateway, their rights, and the routes that manage them."""
