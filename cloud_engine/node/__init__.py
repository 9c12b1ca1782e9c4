"""One engine behind an OpenAI-compatible HTTP face."""
