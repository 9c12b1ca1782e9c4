"""Collection of local answers that the gates judged, as training data for the gates."""
