"""Tasks: requests that an app sends in the same form, the unit that learns and moves to the device."""
