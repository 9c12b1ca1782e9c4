"""Learning from use: experience, and the refit that takes it in."""
