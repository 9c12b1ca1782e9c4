"""A model server on this device or in its private network, as the local tier: Ollama, llama-server, LM Studio."""
