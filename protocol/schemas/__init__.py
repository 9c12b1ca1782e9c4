"""JSON schemas: what of them an answer can be held to."""
