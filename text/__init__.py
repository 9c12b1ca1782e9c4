"""Layer 2: text to tokens and back: chat templates, tokenizers, incremental detokenisation, stop strings."""
