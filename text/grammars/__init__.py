"""Grammars: what an answer must look like, token by token."""
