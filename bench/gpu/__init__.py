"""`make gpu`: everything that needs a CUDA device."""
