"""Layer 8: benchmarks of `updraft bench ...`, the source of every figure in the docs."""
