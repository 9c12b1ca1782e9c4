"""Commands on the ledger: `why` explains a request, `log` lists requests, `usage` adds up costs."""
