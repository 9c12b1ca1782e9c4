"""The paged KV cache: blocks, block tables, the prefix cache, and how many blocks there are."""
