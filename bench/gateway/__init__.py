"""`updraft bench gateway` and `affinity`: the gateway's overhead, and the node it picks for each request."""
