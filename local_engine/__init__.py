"""Layer 4: small quantized GGUF models, run through llama.cpp in this process."""
