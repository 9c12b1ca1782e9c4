"""Evidence in an answer by itself: its parts, its checks, its arithmetic."""
