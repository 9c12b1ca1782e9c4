"""Layer 4: the cloud. A `gateway` in front of `node`s; each node serves an `engine`, which runs one of the `models`."""
