"""Numeric features for the gates, from the question, the answer and the answer's token signals."""
