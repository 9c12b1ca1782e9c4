"""Answers on the wire: whole completions, streams, repeated answers, embeddings."""
