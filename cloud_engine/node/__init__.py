"""One engine behind an OpenAI-compatible HTTP server. Importing this loads no torch; `run_node` does."""

from .process import NodeOptions as NodeOptions
from .process import run_node as run_node
