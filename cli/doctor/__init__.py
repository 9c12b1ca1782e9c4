"""`updraft doctor`: command and checks."""
