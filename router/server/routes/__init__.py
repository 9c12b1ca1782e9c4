"""Endpoints of the router, one module each."""
