"""What several measurements use: reports, statistics and workloads."""
