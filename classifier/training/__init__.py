"""Fitting of a policy to graded rows, and its export."""
