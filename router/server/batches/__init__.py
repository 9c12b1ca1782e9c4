"""Batches in the background: the files that they read and write, and the one who works on them."""
