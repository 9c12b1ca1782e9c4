"""`updraft bench engine`: the cloud engine and its peers."""
