"""Commands on the ledger: one request explained, the latest ones listed, all of them added up."""
