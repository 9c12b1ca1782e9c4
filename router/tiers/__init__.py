"""The tiers: the engine on this device, and OpenAI-compatible clouds."""
