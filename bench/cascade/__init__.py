"""Measurements of the whole cascade: answers from both tiers, and what an escalation costs."""
