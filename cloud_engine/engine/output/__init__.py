"""Output processing: appends sampled tokens to answers, forks answers and finishes them."""
