"""Answers on the wire: completions, streams, cached answers, embeddings."""
