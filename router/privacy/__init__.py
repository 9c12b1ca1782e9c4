"""Privacy rules, which keep private content on this device."""
