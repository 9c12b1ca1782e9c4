"""Generator of docs/reference for developers: commands, settings, routes, metrics, ledger."""
