"""Capacity planning: the number of nodes for a load, simulated with the engine's own scheduler."""
