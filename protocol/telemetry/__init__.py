"""What a process tells of itself: its log, and traces of requests."""
