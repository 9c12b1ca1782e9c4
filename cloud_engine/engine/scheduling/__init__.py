"""Who computes what in the next step. No torch here."""
