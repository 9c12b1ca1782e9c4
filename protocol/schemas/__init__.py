"""Rewriting of JSON schemas for constrained answers."""
