"""Layer 5: the pocket model pair that ships with the package: tasks, training recipe, export, weights."""
