"""Online learning: stored experience, and refitting a policy to it."""
