"""Loading of models and weights from a hub name, a folder or a GGUF file."""
