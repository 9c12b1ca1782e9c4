"""The number of nodes that a load needs, simulated with the scheduler that serves."""
