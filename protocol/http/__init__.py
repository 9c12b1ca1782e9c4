"""HTTP as daemon, gateway and node speak it: the app shell, the server process, server-sent events, metrics."""
