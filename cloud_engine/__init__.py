"""Layer 4: the cloud. A `gateway` in front of `node`s; each node serves one `engine`, which runs one of `models`."""
