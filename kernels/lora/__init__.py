"""Low-rank adapters, one per token of a mixed batch."""
