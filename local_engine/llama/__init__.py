"""llama.cpp: how it is built, its library, contexts, and what of ours computes under it."""
