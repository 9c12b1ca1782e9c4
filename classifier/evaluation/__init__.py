"""How good a gate is: ranking, calibration error, cost against quality."""
