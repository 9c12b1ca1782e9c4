"""Parts shared by several benchmarks: reports, statistics and workloads."""
