"""`updraft plan`."""
