"""Ledgers, prices, budgets and circuit breakers, shared by the router and the gateway."""
