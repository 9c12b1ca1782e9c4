"""Store of this device's models: fetched once, checked, and kept under a name."""
