"""Logging of processes, and tracing of requests."""
