"""Shared parts of commands: options, tables, progress, child processes."""
