"""A node: one engine with an OpenAI-compatible HTTP server. Only the engine's process imports torch."""

from .process import NodeOptions as NodeOptions
from .process import run_node as run_node
