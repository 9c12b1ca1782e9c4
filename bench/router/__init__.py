"""Benchmarks of learned routers and gates: `updraft bench router`, `gates` and `guarantee`."""
