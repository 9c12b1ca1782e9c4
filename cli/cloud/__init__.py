"""`updraft cloud`: command that runs a gateway and its nodes."""
