"""Layer 6: the router, with gates, escalation and ledger, and the daemon that serves it on a local OpenAI port."""
