"""The node as a process: its options, and the way from a model folder to a served port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.errors import ConfigurationError, MissingDependencyError
from ...protocol.server import bind_socket, exit_with_parent, serve

if TYPE_CHECKING:
    from ..engine.config import Policy
    from .app import Served


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """`model` and `draft` are names as `models.hub.find_model` takes them.

    `draft` is a smaller model of the same vocabulary for speculative decoding. `threads` None: torch's default.
    `num_blocks` None sizes the KV cache for a full batch. `tool_parser`: a `ToolFormat`'s name, or "auto".
    `exit_with_parent`: stop when the starting process is gone.
    """

    model: str
    draft: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    threads: int | None = None
    max_batch_size: int = 16
    token_budget: int = 512
    num_blocks: int | None = None
    policy: Policy = "fcfs"
    num_draft_tokens: int = 4
    device: str = "cpu"
    tool_parser: str = "auto"
    ready_file: Path | None = None
    exit_with_parent: bool = False


def run_node(options: NodeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError (before loading), ModelLoadError, ConfigurationError."""
    from .app import create_node_app

    if options.exit_with_parent:
        exit_with_parent()
    with bind_socket(options.host, options.port) as sock:
        app = create_node_app(_load(options))
        serve(app, sock=sock, ready_file=options.ready_file)


def _load(options: NodeOptions) -> Served:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError('A node needs torch: pip install "updraft-llm[cloud]"') from error
    from ..engine.async_engine import AsyncEngine
    from ..engine.config import EngineConfig
    from ..engine.engine import Engine
    from ..models.hub import find_model
    from ..models.progress import loading_bar
    from .app import Served

    if options.device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigurationError(f"device must be cpu or cuda, got {options.device!r}.", param="device")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigurationError("device: torch sees no CUDA device here. Use --device cpu.", param="device")
    config = EngineConfig(
        max_batch_size=options.max_batch_size,
        token_budget=options.token_budget,
        num_blocks=options.num_blocks,
        policy=options.policy,
        num_draft_tokens=options.num_draft_tokens,
        device=options.device,
        num_threads=options.threads,
    )
    draft = find_model(options.draft) if options.draft else None
    with loading_bar() as progress:
        engine = Engine.from_folder(find_model(options.model), draft=draft, config=config, progress=progress)
    return Served(AsyncEngine(engine), engine.tokenizer, engine.model_id, engine.context_length, options.tool_parser)
