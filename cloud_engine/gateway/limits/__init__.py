"""Limits of keys, tenants and models: rates, requests in flight, budgets."""
