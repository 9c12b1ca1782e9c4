"""The types that all folders of the engine share. This leaf imports no other folder of it, and no torch."""
