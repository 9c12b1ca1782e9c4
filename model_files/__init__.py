"""Model files on disk and on model hubs: GGUF headers, identity, default sampling, downloads.

This is a separate package because the local engine and the node both need it and may not import each other.
"""
