"""What the ledger says: one request explained, the latest ones listed, all of them added up."""
