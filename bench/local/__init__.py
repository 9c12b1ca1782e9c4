"""`updraft bench local`: the on-device engine and its peers."""
