"""The scheduler of steps. No torch here."""
