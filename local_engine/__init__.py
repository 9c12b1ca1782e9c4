"""Floor 4: a small quantized GGUF model through llama.cpp, in process."""
