"""One request as the router reads it: its chat, its caller, its JSON."""
