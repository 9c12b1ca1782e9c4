"""Privacy rules: what must not leave this device."""
