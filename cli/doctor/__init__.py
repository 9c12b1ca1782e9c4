"""`updraft doctor`: what is installed, what is broken, and the next step for each."""
