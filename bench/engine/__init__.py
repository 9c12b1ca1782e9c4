"""`updraft bench engine`: the cloud engine compared with its peers."""
