"""The features that gates read: the question, the answer and its token signals, as numbers."""
