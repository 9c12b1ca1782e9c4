"""The choice of the node that takes a request."""
