"""Layer 8: the benchmarks that `updraft bench ...` runs. They produce every figure in the docs."""
