"""Calibration: from graded rows to guaranteed thresholds (curves, bounds, operating points, drift)."""
