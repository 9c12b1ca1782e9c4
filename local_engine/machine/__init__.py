"""This machine: its cores and memory, saved findings, and child processes."""
