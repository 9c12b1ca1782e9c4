"""Local tier over a model server on this device or its private network: Ollama, llama-server, LM Studio."""
