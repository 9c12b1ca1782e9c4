"""Calibrated policies: their folder, their graphs and their decisions."""
