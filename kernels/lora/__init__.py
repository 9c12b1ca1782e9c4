"""Low-rank adapters, chosen per token of a mixed batch."""
