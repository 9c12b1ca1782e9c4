"""The models of this device on the command line: their names, and `pull`, `models`, `rm`, `verify`."""
