"""`updraft ask` and `updraft chat`."""
