"""HTTP layer shared by daemon, gateway and node: app shell, server process, server-sent events, metrics."""
