"""The quality of a gate: ranking, calibration error, cost against quality."""
