"""`updraft bench local`: the on-device engine compared with other runners of the same model files."""
