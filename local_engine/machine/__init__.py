"""This machine: its cores and memory, saved results of checks, and child processes."""
