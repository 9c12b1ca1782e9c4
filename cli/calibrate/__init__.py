"""`updraft calibrate`: the command, asking both tiers, grading, and what is shown."""
