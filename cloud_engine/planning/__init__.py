"""How many nodes a load needs, simulated with the scheduler that serves."""
