"""Grammars that constrain an answer token by token."""
