"""The gates: rules before everything, then calibrated probabilities before, during and after the local answer."""
