"""The node's HTTP routes, and the conversion of request bodies to engine requests."""
