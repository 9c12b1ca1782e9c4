"""A process's log, and traces of requests."""
