"""Layer 8: `updraft bench`, the measurements behind every figure in the docs."""
