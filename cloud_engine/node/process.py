"""The node process: its options, and the start of its engine and HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError, MissingDependencyError
from ...protocol.http.access import Access, check_keyless
from ...protocol.http.server import DRAIN_S, bind_socket, exit_with_parent, serve, url_of
from ...protocol.http.tls import TlsFiles, check_encrypted
from ..engine.config import EngineConfig
from .registration import Registration, RegistrationOptions

if TYPE_CHECKING:
    from socket import socket

_SET_KEY = "set UPDRAFT_NODE_API_KEY here and for the gateway (or --client-api-key-file here, --api-key-file there)"


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of a node that serves one model."""

    # Model name, as accepted by `models.loading.hub.find_model`.
    model: str
    engine: EngineConfig
    # Name of a smaller model with the same vocabulary, for speculative decoding. None: no draft model.
    draft: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    # Restart the engine process after a crash.
    restart: bool = False
    # Time for requests in flight to finish after SIGTERM, in seconds.
    drain_timeout_s: float = DRAIN_S
    # Name of a `ToolFormat`, or "auto" to detect one in the chat template.
    tool_call_parser: str = "auto"
    # `chatml`, or the path of a Jinja file. None: the model's template, or ChatML if it has none.
    chat_template: str | None = None
    # Key that requests must send; required beyond loopback. See `Access` for this option and the next three.
    api_key: str | None = field(default=None, repr=False)
    # Key for the routes that put the node to sleep. None: these routes are refused.
    admin_key: str | None = field(default=None, repr=False)
    # Serve `/metrics` without a key.
    public_metrics: bool = False
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    # Certificate and private key of the server. None: plain HTTP, allowed beyond loopback only if `insecure`.
    tls: TlsFiles | None = None
    insecure: bool = False
    ready_file: Path | None = None
    # Stop as soon as the parent process is gone.
    exit_with_parent: bool = False
    # Registration with a gateway. None: do not register.
    registration: RegistrationOptions | None = None


prepare_types(NodeOptions)


def run_node(options: NodeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError (before loading), ModelLoadError or ConfigurationError.

    The engine runs in its own process; this process never imports torch. On a machine after machine 0, run its ranks of
    the model instead of a server (`run_machine`).
    """
    if options.exit_with_parent:
        exit_with_parent(options.drain_timeout_s)
    if options.engine.node_rank:
        _require_zmq()
        from ..engine.ranks.machine import run_machine
        from ..models.loading.hub import find_model

        run_machine(find_model(options.model), options.engine, restart=options.restart)
        return
    if options.api_key is None:
        check_keyless(options.host, _SET_KEY)
        if options.engine.scheduling_policy == "fair":
            raise ConfigurationError(
                f"--scheduling-policy fair needs a key, so that only the gateway can name tenants: {_SET_KEY}.",
                param="scheduling_policy",
            )
    check_encrypted(options.host, options.tls, insecure=options.insecure)
    if options.registration is not None:
        options.registration.check(options.host, insecure=options.insecure)
    access = Access(
        (options.host, *options.allowed_hosts),
        tuple(options.allowed_origins),
        options.api_key,
        ("/health", "/metrics") if options.public_metrics else ("/health",),
        admin_key=options.admin_key,
        own_user=_SET_KEY if options.api_key is None else "",
    )
    _require_zmq()
    from ..engine.process.engine_process import EngineProcess
    from ..engine.process.messages import Load
    from ..models.loading.gguf_tokenizer import load_tokenizer
    from ..models.loading.hub import find_model
    from ..models.loading.progress import loading_bar
    from .api.app import NodeEngine, create_node_app

    with bind_socket(options.host, options.port) as sock:
        folder = find_model(options.model)
        draft = str(find_model(options.draft)) if options.draft else None
        load = Load(str(folder), draft, options.engine)
        with EngineProcess(load, restart=options.restart) as engine:
            with loading_bar() as progress:
                ready = engine.wait_ready(progress)
            tokenizer = load_tokenizer(
                folder, chat_template=options.chat_template, tool_call_parser=options.tool_call_parser
            )
            if tokenizer.chat_template is not None:
                tokenizer.chat_template.compile()
            served = NodeEngine(
                engine,
                tokenizer,
                ready.model_id,
                ready.context_length,
                options.tool_call_parser,
                ready.sampling,
                options.drain_timeout_s,
            )
            app = create_node_app(served, access, _registration(options, sock))
            serve(app, sock=sock, ready_file=options.ready_file, drain_s=options.drain_timeout_s, tls=options.tls)


def _require_zmq() -> None:
    if find_spec("zmq") is None:
        raise MissingDependencyError("A node needs pyzmq: pip install '.[cloud]' in a clone of Updraft")


def _registration(options: NodeOptions, sock: socket) -> Registration | None:
    if options.registration is None:
        return None
    url = url_of(sock, "http" if options.tls is None else "https")
    capacity = options.engine.max_num_seqs + options.engine.max_waiting
    return Registration(options.registration, url, capacity, options.api_key)
