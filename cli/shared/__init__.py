"""Code that commands share: options, tables, progress, child processes."""
