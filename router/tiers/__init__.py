"""Tiers: the engine or a server on this device, and clouds of any provider."""
