"""What commands share: options, tables, progress, child processes."""
