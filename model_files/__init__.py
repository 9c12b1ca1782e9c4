"""Model files before anybody loads them: their GGUF headers, and the names they have on a model hub.

A room of its own because the device and the node read the same files and may not import each other.
"""
