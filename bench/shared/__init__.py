"""Parts that several measurements use: reports, statistics and workloads."""
