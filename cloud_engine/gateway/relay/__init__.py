"""The path of one request: read, relay to a node, stream the answer, record the usage."""
