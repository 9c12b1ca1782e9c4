"""Answers to HTTP requests: completions, streams, cached answers, embeddings."""
