"""The ledger of the router and of the gateway: one row per request, written in groups, kept across crashes."""
