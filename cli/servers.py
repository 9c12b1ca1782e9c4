"""`updraft serve`, `node` and `gateway`: the servers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..protocol.errors import ConfigurationError
from ..protocol.telemetry.logs import FORMAT_VARIABLE
from ..text.tool_calls import FormatName
from .shared import options, output
from .shared.help_panels import shows
from .shared.settings_tables import GatewayConfigFile, NodeConfigFile, RouterConfigFile

if TYPE_CHECKING:
    from ..cloud_engine.engine.config import EngineConfig
    from ..cloud_engine.node.registration import RegistrationOptions
    from ..protocol.http.tls import TlsFiles
    from ..router.config import RouterConfig

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all networks.")]
ReadyFile = Annotated[
    Path | None, typer.Option(metavar="PATH", help="File to write the server's URL to when it is ready.")
]
ExitWithParent = Annotated[bool, typer.Option("--exit-with-parent", help="Stop when the parent process ends.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free port.")]
DrainTimeout = Annotated[
    float, typer.Option(min=0, help="Seconds that requests in flight have to finish after SIGTERM or Ctrl-C.")
]


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Options of all servers: permitted hosts and origins, TLS, and log format."""

    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-hosts",
            metavar="NAME",
            help="Host name that clients may use; repeatable. A server beyond loopback also allows all IP addresses.",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origins", metavar="URL", help="Origin whose web pages may send requests; repeatable."),
    ] = None
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Certificate chain in PEM; reloaded when it changes.")
    ] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="PATH", help="Private key of the certificate.")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines over plain HTTP, behind a TLS proxy for example.")
    ] = False
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(envvar=FORMAT_VARIABLE, help="Log format: plain text, or one JSON object per line."),
    ] = "text"

    def of_node(self) -> dict[str, Any]:
        """Return the options of nodes and gateways. Raises ConfigurationError if TLS certificate or key is missing."""
        return {
            "allowed_hosts": self.allowed_hosts or (),
            "allowed_origins": self.allowed_origins or (),
            "tls": self.tls(),
            "insecure": self.insecure,
        }

    def tls(self) -> TlsFiles | None:
        from ..protocol.http.tls import TlsFiles

        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ConfigurationError("--ssl-certfile and --ssl-keyfile go together: give both.", param="ssl_certfile")
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile)


@dataclass(frozen=True, slots=True)
class RegistrationFlags:
    """Options for the registration of a node with a gateway."""

    register: Annotated[
        str | None, typer.Option(metavar="URL", help="Gateway to register with, at all addresses of its host name.")
    ] = None
    register_api_key_env: Annotated[str | None, options.key_env("the key for --register", "--register-api-key-env")] = (
        None
    )
    register_api_key_file: Annotated[
        Path | None,
        options.key_file("the key for --register: updraft keys create NAME --scope node", "--register-api-key-file"),
    ] = None
    register_as: Annotated[
        str | None, typer.Option(metavar="URL", help="URL at which the gateway reaches this node. [its own URL]")
    ] = None

    def registration(self) -> RegistrationOptions | None:
        """Return the registration; None without --register. Raises ConfigurationError for incomplete options."""
        from ..cloud_engine.node.registration import RegistrationOptions

        key = options.given_key(self.register_api_key_env, self.register_api_key_file, "--register-api-key")
        if self.register is None:
            if key is not None or self.register_as is not None:
                raise ConfigurationError("--register-api-key-file and --register-as need --register.", param="register")
            return None
        if key is None:
            raise ConfigurationError("--register needs --register-api-key-file or --register-api-key-env.")
        return RegistrationOptions(self.register, key, self.register_as)


@dataclass(frozen=True, slots=True)
class EngineFlags(options.BatchLimits):
    """Options for fields of `EngineConfig`."""

    step_costs: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help="Measured step times to derive the limits from: updraft bench engine --only steps --json PATH.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of prompt plus answer. [as model and cache allow]")
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(min=1, help="KV cache blocks. [for a full batch, if memory allows]")
    ] = None
    default_max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens per answer if the request sets no max_tokens.")
    ] = 4096
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "shortest-prefill", "fair"],
        typer.Option(
            help="Order of waiting requests: by arrival, by their priority field (-100 to 100), short prompts first, "
            "or tenants in turn by their weights."
        ),
    ] = "fcfs"
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Maximum requests that wait for a slot in the batch; more are refused.")
    ] = 256
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV cache of equal prefixes."
        ),
    ] = True
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", min=1, help="Maximum draft tokens per step and request. [by --mode]"),
    ] = None
    ngram: Annotated[bool, typer.Option("--ngram", help="Also draft from repetitions in prompt and answer.")] = False
    device: Annotated[str, typer.Option(envvar="UPDRAFT_DEVICE", help="Device: cpu, cuda or cuda:NUMBER.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of weights; auto is the checkpoint's on a GPU, and float32 on a CPU."),
    ] = "auto"
    quantization: Annotated[
        Literal["fp8", "int8", "int4"] | None,
        typer.Option(help="Quantize the linear layers while loading; quantized checkpoints need no option."),
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of a GPU's memory for weights, KV cache and activations.")
    ] = 0.92
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per KV cache block. [64 on GPUs, else 16]")] = (
        None
    )
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Compute bit-identical results in any batch: slower, CPU only."),
    ] = False
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, help="Processes, and GPUs, that share the model's layers.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Share whole experts between the processes.")
    ] = False
    pipeline_parallel: Annotated[
        int, typer.Option("--pipeline-parallel", min=1, help="Stages of consecutive layers, each on its own GPUs.")
    ] = 1
    nnodes: Annotated[
        int, typer.Option("--nnodes", min=1, help="Machines that share the model; UPDRAFT_GROUP_KEY is their key.")
    ] = 1
    node_rank: Annotated[
        int, typer.Option("--node-rank", min=0, help="Number of this machine; machine 0 serves the requests.")
    ] = 0
    master_addr: Annotated[
        str, typer.Option("--master-addr", metavar="HOST", help="Address of machine 0 for the other machines.")
    ] = ""
    master_port: Annotated[
        int, typer.Option("--master-port", min=1, max=65534, help="Port of machine 0; the next one is used, too.")
    ] = 29500
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], typer.Option("--kv-cache-dtype", help="KV cache in the weights' data type, or in FP8.")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "native", "triton"],
        typer.Option(help="Attention kernels: plain torch, C (native, on a CPU), or Triton (on a GPU)."),
    ] = "auto"
    enforce_eager: Annotated[
        bool, typer.Option(help="On a GPU, decode without CUDA graphs: faster start, slower steps.")
    ] = False
    record_steps: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Record the last 10,000 steps: hashes and times, no text."),
    ] = None

    def config(self, threads: int | None) -> EngineConfig:
        from ..cloud_engine.engine.config import EngineConfig, settings_of, usual_block_size
        from ..cloud_engine.planning.mode_limits import limits_from

        values = asdict(self)
        of_mode = limits_from(values.pop("step_costs"), values.pop("mode"), self.max_step_ms, self.device)
        limits = settings_of(of_mode, **{name: values.pop(name) for name in asdict(of_mode)})
        values["block_size"] = values["block_size"] or usual_block_size(self.device)
        return EngineConfig(**limits, **values, threads=threads)


@shows("--local", "--cloud-url", "--cloud-model", "--api-key-env", "--quality", "--host", "--port", "--config")
def serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = options.SERVE_PORT,
    client_api_key_env: Annotated[
        str | None, options.key_env("the key that clients must send", "--client-api-key-env")
    ] = None,
    client_api_key_file: Annotated[
        Path | None, options.key_file("the key that clients must send", "--client-api-key-file")
    ] = None,
    access: AccessFlags,
    log_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Log file; rotated when it grows large.")
    ] = None,
    ready_file: ReadyFile = None,
    _config: RouterConfigFile = None,
    pair: options.Pair,
) -> None:
    """Run the router as a local OpenAI server that any app can use without code changes.

    Point an OpenAI client at the printed address + /v1, with any key, and model="auto", "local" or "cloud".
    Other machines (--host) need your key (--client-api-key-env); web pages of other sites need --allowed-origins.

    \b
    Examples
      updraft serve --local pocket
      updraft serve --local model.gguf --cloud-url https://host/v1 \\
          --cloud-model big --api-key-env HOST_KEY
      curl http://127.0.0.1:4114/v1/chat/completions -H 'content-type: application/json' \\
          -d '{"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}'
    """
    from ..protocol.http.server import bind_socket
    from ..protocol.settings import config_file
    from ..protocol.telemetry.logs import log_to_file
    from ..router.server.app import DaemonOptions, Reload, run_daemon
    from .talk.conversation import introduction

    os.environ[FORMAT_VARIABLE] = access.log_format
    if log_file is not None:
        log_to_file(log_file)
    key = options.given_key(client_api_key_env, client_api_key_file, "--client-api-key")
    own = {"allowed_hosts": access.allowed_hosts, "allowed_origins": access.allowed_origins}

    def load() -> RouterConfig:
        return replace(pair.config(), **{name: tuple(value) for name, value in own.items() if value})

    config = load()
    daemon = DaemonOptions(config, host, port, ready_file, key, access.tls(), access.insecure)
    bind_socket(host, port).close()  # report a busy port before the packaged cloud starts
    for line in introduction(config):
        output.note(line)
    with options.with_cloud(config, output.note) as running:
        # No reload with the packaged cloud: the settings file does not hold its address.
        reload = Reload(config_file(), load) if running == config else None
        run_daemon(replace(daemon, config=running, reload=reload))


@shows(
    *("--model", "--draft", "--device", "--dtype", "--host", "--port", "--client-api-key-file", "--register"),
    *("--register-api-key-file", "--mode", "--max-model-len", "--max-num-seqs", "--config"),
)
def node(
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Folder with config.json and safetensors, GGUF file, owner/repo or hf:owner/repo/FILE.gguf on a hub, "
            "or pocket.",
        ),
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Smaller draft model with the same vocabulary, as --model; pocket means pocket-small.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = options.NODE_PORT,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads. [all cores]")] = None,
    engine: EngineFlags,
    restart: Annotated[bool, typer.Option("--restart", help="Restart the engine when its process dies.")] = False,
    drain_timeout_s: DrainTimeout = 10.0,
    tool_call_parser: Annotated[
        Literal["auto", FormatName],
        typer.Option("--tool-call-parser", help="Format of the model's tool calls. [auto: that of its chat template]"),
    ] = "auto",
    chat_template: options.ChatTemplate = None,
    client_api_key_env: Annotated[
        str | None,
        options.key_env("the key that clients must send", "--client-api-key-env", note=" [UPDRAFT_NODE_API_KEY]"),
    ] = None,
    client_api_key_file: Annotated[
        Path | None, options.key_file("the key that clients must send", "--client-api-key-file")
    ] = None,
    access: AccessFlags,
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="Serve /metrics without a key, for endpoint pickers.")
    ] = False,
    registration: RegistrationFlags,
    ready_file: ReadyFile = None,
    exit_with_parent: ExitWithParent = False,
    _config: NodeConfigFile = None,
) -> None:
    """Serve one large model through an OpenAI API, with /health and /metrics.

    With --draft, a smaller model proposes tokens that the large model
    verifies; answers stay the same. The number of proposed tokens follows
    the measured speed. UPDRAFT_NODE_API_KEY (or --client-api-key-file)
    is the key that clients must send. Other machines (--host) need a key and TLS.

    \b
    Examples
      updraft node --model pocket --draft pocket
      updraft node --model ./models/big
      updraft node --model ./models/big --draft ./models/small.gguf --port 0
      updraft node --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
      updraft node --model ./models/big --register https://gateway:8000 --register-api-key-file node.key
      updraft node --config cloud.toml
    """
    from ..cloud_engine.node.process import NodeOptions, run_node
    from ..embedded import pocket

    os.environ[FORMAT_VARIABLE] = access.log_format
    run_node(
        NodeOptions(
            str(pocket.pocket_large_folder()) if model == "pocket" else model,
            engine.config(threads),
            draft=str(pocket.pocket_small_folder()) if draft == "pocket" else draft,
            host=host,
            port=port,
            restart=restart,
            drain_timeout_s=drain_timeout_s,
            tool_call_parser=tool_call_parser,
            chat_template=chat_template,
            api_key=options.node_key(client_api_key_env, client_api_key_file, "--client-api-key"),
            admin_key=os.environ.get("UPDRAFT_NODE_ADMIN_KEY") or None,
            public_metrics=public_metrics,
            **access.of_node(),
            ready_file=ready_file,
            exit_with_parent=exit_with_parent,
            registration=registration.registration(),
        )
    )


@shows(
    *("--node", "--nodes-file", "--keys", "--host", "--port", "--api-key-file", "--ledger", "--limits", "--prices"),
    "--config",
)
def gateway(
    *,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="URL", help="Node, or any other OpenAI-compatible server; repeatable."),
    ] = None,
    nodes_file: Annotated[
        Path | None,
        typer.Option(metavar="TOML", help="File of nodes with their own keys, limits, timeouts and prices."),
    ] = None,
    max_concurrency_per_node: Annotated[
        int | None, typer.Option(min=1, help="Maximum requests in flight per node; further requests wait. [no limit]")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Maximum waiting requests; if more arrive, the lowest priority is refused.")
    ] = 256,
    ledger: Annotated[
        str | None,
        typer.Option(
            envvar="UPDRAFT_GATEWAY_LEDGER",
            metavar="DB",
            help="Ledger to write: a SQLite file, or a postgresql:// URL. [gateway.sqlite3 in the state folder]",
        ),
    ] = None,
    ledger_failure: Annotated[
        Literal["stop", "continue"], typer.Option(help="Stop or continue serving while the ledger cannot be written.")
    ] = "stop",
    keep_days: Annotated[float | None, typer.Option(min=1, help="Days to keep usage rows. [forever]")] = None,
    prices: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Price table (TOML, JSON or LiteLLM's); path or https URL.")
    ] = None,
    limits: Annotated[Path | None, typer.Option(help="TOML file with the limits of tenants and models.")] = None,
    limits_url: Annotated[
        str | None,
        typer.Option(
            envvar="UPDRAFT_GATEWAY_LIMITS_URL",
            metavar="URL",
            help="Redis or Valkey server for limits that several gateways share.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Key database of updraft keys. [keys.sqlite3 in the state folder]")
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Accept requests without a key; loopback only.")] = False,
    host: Host = "127.0.0.1",
    port: Port = options.GATEWAY_PORT,
    api_key_env: Annotated[
        str | None, options.key_env("the key to send to the nodes", note=" [UPDRAFT_NODE_API_KEY]", panel="Cloud")
    ] = None,
    api_key_file: Annotated[Path | None, options.key_file("the key to send to the nodes", panel="Cloud")] = None,
    workers: Annotated[int, typer.Option(min=1, max=32, help="Number of gateway processes on the port.")] = 1,
    drain_timeout_s: DrainTimeout = 10.0,
    timeout_s: Annotated[float, typer.Option(help="Timeout of a request, body included, in seconds.")] = 600.0,
    connect_timeout_s: Annotated[float, typer.Option(help="Timeout of connections to nodes, in seconds.")] = 2.0,
    first_token_timeout_s: Annotated[float, typer.Option(help="Timeout until a stream begins, in seconds.")] = 120.0,
    idle_timeout_s: Annotated[
        float, typer.Option(help="Maximum pause in a stream, in seconds. SSE comments extend it up to four times.")
    ] = 30.0,
    hedge_after_s: Annotated[
        float | None, typer.Option(help="Seconds without an answer until a second node gets the request, too. [never]")
    ] = None,
    response_cache: Annotated[
        int, typer.Option(min=0, metavar="MB", help="Cache of deterministic answers, separate per tenant; 0: off.")
    ] = 0,
    slo_ttft_s: Annotated[
        float, typer.Option(min=0.001, help="Objective for metrics: seconds to a stream's first token.")
    ] = 1.0,
    slo_tpot_s: Annotated[float, typer.Option(min=0.001, help="Objective for metrics: seconds per later token.")] = 0.1,
    access: AccessFlags,
    ready_file: ReadyFile = None,
    exit_with_parent: ExitWithParent = False,
    _config: GatewayConfigFile = None,
) -> None:
    """Run the cloud endpoint that apps escalate to, with keys, limits, metering, and failover between nodes.

    The gateway sends its nodes the key of UPDRAFT_NODE_API_KEY, --api-key-env or --api-key-file.

    \b
    Examples
      updraft keys create team-a
      updraft gateway --node http://10.0.0.1:4116 --node http://10.0.0.2:4116
      updraft gateway --config cloud.toml
    """
    from ..cloud_engine.gateway.limits.accounting import AccountingOptions
    from ..cloud_engine.gateway.process import GatewayOptions, run_gateway
    from ..cloud_engine.gateway.relay.counters import ServiceObjective
    from ..cloud_engine.gateway.upstream.timeouts import Timeouts
    from ..protocol.settings import state_folder

    os.environ[FORMAT_VARIABLE] = access.log_format
    if "UPDRAFT_GATEWAY_DB" in os.environ:
        raise ConfigurationError("`UPDRAFT_GATEWAY_DB` is now `UPDRAFT_GATEWAY_LEDGER`: rename the variable.")
    database = str(state_folder() / "gateway.sqlite3") if ledger is None else ledger
    run_gateway(
        GatewayOptions(
            nodes=nodes or (),
            nodes_file=nodes_file,
            max_concurrency_per_node=max_concurrency_per_node,
            max_waiting=max_waiting,
            accounting=AccountingOptions(database, ledger_failure, keep_days, prices, limits, limits_url),
            keys=keys if no_auth else options.key_database(keys),
            no_auth=no_auth,
            host=host,
            port=port,
            node_api_key=options.node_key(api_key_env, api_key_file),
            workers=workers,
            drain_timeout_s=drain_timeout_s,
            response_cache_mb=response_cache,
            objective=ServiceObjective(slo_ttft_s, slo_tpot_s),
            timeouts=Timeouts(connect_timeout_s, first_token_timeout_s, idle_timeout_s, timeout_s, hedge_after_s),
            **access.of_node(),
            ready_file=ready_file,
            exit_with_parent=exit_with_parent,
        )
    )
