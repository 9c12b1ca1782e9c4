"""Load balancing: node health, selection and queueing."""
