"""Output processing: appends sampled tokens to answers and finishes them."""
