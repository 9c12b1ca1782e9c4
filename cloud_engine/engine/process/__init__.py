"""The engine's processes: the asyncio client, the core behind its sockets, and the loop that both drive."""
