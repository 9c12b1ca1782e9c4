"""Evaluation of a gate: ranking, calibration error, and cost against quality."""
