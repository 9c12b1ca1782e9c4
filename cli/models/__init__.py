"""Local models on the command line: their names, and `pull`, `models`, `rm`, `verify`."""
