"""Gates: rules first, then calibrated probabilities before, during and after the local answer."""
