"""Ledger shared by router and gateway: one row per request, committed in batches, crash-safe."""
