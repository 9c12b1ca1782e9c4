"""Floor 4: the cloud: `gateway` in front of `node`s, each the HTTP server of one `engine` running one of `models`."""
