"""From a name, a folder or a GGUF file to a model with its weights."""
