"""Chat templates, rendered in a sandbox as untrusted programs."""
