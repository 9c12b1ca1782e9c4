"""What an answer shows by itself: its parts, its checks, its arithmetic."""
