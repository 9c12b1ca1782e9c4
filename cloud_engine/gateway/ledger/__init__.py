"""The usage ledger: one row per request with its tokens, cost and outcome."""
