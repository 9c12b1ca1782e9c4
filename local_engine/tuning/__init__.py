"""`updraft tune`: the settings with which a model is fastest on this machine."""
