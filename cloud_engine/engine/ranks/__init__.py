"""Several processes that compute one model: rank 0 has the engine, and the other ranks follow its plans."""
