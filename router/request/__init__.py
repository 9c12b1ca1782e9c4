"""A request as the router reads it: chat, caller and JSON."""
