"""The scheduler of steps. Imports no torch."""
