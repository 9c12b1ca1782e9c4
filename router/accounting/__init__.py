"""What requests cost: ledger, budgets, prices, and the record of one request."""
