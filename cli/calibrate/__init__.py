"""`updraft calibrate`: command, queries to both tiers, grading, and output."""
