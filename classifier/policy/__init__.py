"""A calibrated policy: its folder, its graphs, and its decisions."""
