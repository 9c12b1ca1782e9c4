"""The models of this device: fetched once, checked, kept under a name."""
