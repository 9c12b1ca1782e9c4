"""This machine: its cores and memory, what was found out about it, and child processes."""
