"""Downloads of model files: resolution of model names, and fetching with resume and checksums."""
