"""Benchmarks of `updraft bench ...`, the source of every figure in the docs."""
