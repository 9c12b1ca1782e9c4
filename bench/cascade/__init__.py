"""Benchmarks of the whole cascade: answers from both tiers, and the cost of an escalation."""
