"""What keys, tenants and models may use up: rates, requests in flight, budgets."""
