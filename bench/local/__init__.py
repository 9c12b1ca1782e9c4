"""`updraft bench local`: the on-device engine compared with its peers."""
