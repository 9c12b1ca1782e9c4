"""`updraft plan`: command and plot."""
