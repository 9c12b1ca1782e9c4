"""Features from the answer's text alone: its parts, consistency checks and arithmetic."""
