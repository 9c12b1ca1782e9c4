"""The usage and cost of requests, one row each."""
