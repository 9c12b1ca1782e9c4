"""The node as a process: its options, and the way from a model folder to a served port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...protocol.errors import MissingDependencyError
from ...protocol.http.access import Access, check_keyless
from ...protocol.http.server import DRAIN_S, bind_socket, exit_with_parent, serve

if TYPE_CHECKING:
    from ...kernels.runtime.backend import AttentionChoice
    from ..engine.config import Policy
    from ..engine.process.messages import Load


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """`model` and `draft` are names as `models.hub.find_model` takes them. `max_step_ms`, `context_length`,
    `num_blocks`, `default_max_tokens`, `max_waiting`, `prefix_caching`, `cuda_graphs`, `dtype`, `block_size` (None:
    what suits the device), `batch_invariant`, `attention_backend`: see `EngineConfig`. `draft` is a smaller model of
    the same vocabulary for speculative decoding.
    """

    model: str
    draft: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    threads: int | None = None
    max_batch_size: int = 16
    token_budget: int = 512
    max_step_ms: int = 200
    context_length: int | None = None
    num_blocks: int | None = None
    default_max_tokens: int = 4096
    policy: Policy = "fcfs"
    max_waiting: int = 256
    prefix_caching: bool = True
    num_draft_tokens: int = 8
    # Draft from the text itself, too. `threads` None: torch's default.
    ngram: bool = False
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    block_size: int | None = None
    batch_invariant: bool = False
    attention_backend: AttentionChoice = "auto"
    cuda_graphs: bool = True
    # Replace an engine that dies.
    restart: bool = False
    # What requests in flight get to finish on SIGTERM.
    drain_seconds: float = DRAIN_S
    # A `ToolFormat`'s name, or "auto".
    tool_parser: str = "auto"
    # What requests must send; needed beyond loopback. This and the next two: see `Access`.
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    ready_file: Path | None = None
    # Stop when the starting process is gone.
    exit_with_parent: bool = False


def run_node(options: NodeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError (before loading), ModelLoadError, ConfigurationError.

    The engine runs in a process of its own; this one never loads torch.
    """
    if options.api_key is None:
        check_keyless(options.host, "set UPDRAFT_NODE_API_KEY here and for the gateway")
    access = Access((options.host, *options.allowed_hosts), tuple(options.allowed_origins), options.api_key)
    if find_spec("zmq") is None:
        raise MissingDependencyError("A node needs pyzmq: pip install '.[cloud]' in a clone of Updraft")
    from ...text.tokenizer import Tokenizer
    from ..engine.process.engine_process import EngineProcess
    from ..models.loading.hub import find_model
    from ..models.loading.progress import loading_bar
    from .api.app import ServedEngine, create_node_app

    if options.exit_with_parent:
        exit_with_parent(options.drain_seconds)
    with bind_socket(options.host, options.port) as sock:
        folder = find_model(options.model)
        with EngineProcess(_load(folder, options), restart=options.restart) as engine:
            with loading_bar() as progress:
                ready = engine.wait_ready(progress)
            tokenizer = Tokenizer.from_folder(folder)
            if tokenizer.chat_template is not None:
                tokenizer.chat_template.compile()
            served = ServedEngine(
                engine, tokenizer, ready.model_id, ready.context_length, options.tool_parser, ready.sampling
            )
            app = create_node_app(served, access)
            serve(app, sock=sock, ready_file=options.ready_file, drain_s=options.drain_seconds)


def _load(folder: Path, options: NodeOptions) -> Load:
    from ..engine.config import EngineConfig, usual_block_size
    from ..engine.process.messages import Load
    from ..models.loading.hub import find_model

    config = EngineConfig(
        max_batch_size=options.max_batch_size,
        token_budget=options.token_budget,
        max_step_ms=options.max_step_ms,
        context_length=options.context_length,
        num_blocks=options.num_blocks,
        default_max_tokens=options.default_max_tokens,
        policy=options.policy,
        max_waiting=options.max_waiting,
        prefix_caching=options.prefix_caching,
        num_draft_tokens=options.num_draft_tokens,
        ngram=options.ngram,
        device=options.device,
        dtype=options.dtype,
        block_size=usual_block_size(options.device) if options.block_size is None else options.block_size,
        batch_invariant=options.batch_invariant,
        attention_backend=options.attention_backend,
        cuda_graphs=options.cuda_graphs,
        num_threads=options.threads,
    )
    return Load(str(folder), str(find_model(options.draft)) if options.draft else None, config)
