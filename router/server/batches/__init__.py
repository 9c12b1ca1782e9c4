"""Background batches: their files, and the worker that runs them."""
