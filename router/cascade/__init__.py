"""Cascade of one request through the gates, and its escalation to a cloud."""
