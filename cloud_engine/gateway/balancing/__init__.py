"""Which node takes a request."""
