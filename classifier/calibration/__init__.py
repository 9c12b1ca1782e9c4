"""From graded rows to thresholds that hold: curves, bounds, operating points, drift."""
