"""`updraft bench gateway` and `affinity`: what the gateway adds, and where it places requests."""
