"""Stores of answers, files and batches. The settings `store` and `files` turn them on."""
