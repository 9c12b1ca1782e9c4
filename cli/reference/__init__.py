"""The pages of docs/reference, made from the code: commands, settings, routes, metrics, ledger. For developers only."""
