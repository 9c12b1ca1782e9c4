"""The running engine: its thread, its scheduler, its cells of the KV cache, and its answers."""
