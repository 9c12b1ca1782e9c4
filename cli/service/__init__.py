"""`updraft service`: runs the router as a background service."""
