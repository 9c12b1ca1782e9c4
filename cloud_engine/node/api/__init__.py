"""The node's HTTP routes, and what turns their bodies into requests to the engine."""
