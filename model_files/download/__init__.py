"""Downloads of model files: what a name means, and the one routine that writes bytes to a disk."""
