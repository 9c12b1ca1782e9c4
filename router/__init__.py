"""Layer 6: the cascade: gates, escalation, ledger, and the daemon that serves it on a local OpenAI port."""
