"""Accounting of requests: ledger, budgets, prices, and the record of one request."""
