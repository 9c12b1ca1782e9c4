"""Limits of keys, tenants and models: rates, concurrency and budgets."""
