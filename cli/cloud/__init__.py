"""`updraft cloud`."""
