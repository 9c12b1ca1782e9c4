"""`updraft bench gateway` and `updraft bench affinity`: the gateway's overhead, and its choice of nodes."""
