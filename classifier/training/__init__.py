"""Fits a policy to graded rows, exports it, and reports on it."""
