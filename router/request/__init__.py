"""Parsing of requests: chat requests, their callers, and checks of decoded JSON."""
