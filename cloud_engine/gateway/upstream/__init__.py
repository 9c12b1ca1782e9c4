"""Connections to the nodes."""
