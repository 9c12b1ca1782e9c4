"""`updraft bench engine`: the cloud engine compared with transformers."""
