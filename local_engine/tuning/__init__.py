"""`updraft tune`: search for the fastest settings of a model on this machine."""
