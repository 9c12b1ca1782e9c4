"""Running an engine: the asyncio client, the core process behind sockets, and the engine loop."""
