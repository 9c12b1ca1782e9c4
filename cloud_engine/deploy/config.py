"""The YAML file of a cloud: a gateway, and its models with their engines, replicas and machines."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ...accounting.ledger.workers import MAX_WORKERS
from ...model_files.download.naming import is_node_path
from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError, MissingDependencyError
from ...protocol.http.tls import check_encrypted
from ...protocol.settings import state_folder
from ...protocol.unicode_forms import read_text
from ...protocol.validation_messages import plain_words
from ...text.tool_calls import FormatName
from ..engine.config import EngineConfig, Mode, settings_of, usual_block_size
from ..planning.mode_limits import limits_from

Positive = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1024)]
EngineKind = Literal["updraft", "vllm", "sglang"]
_OWN = (
    *("draft", "mode", "step_costs", "tool_call_parser", "chat_template"),
    *("max_surge_percent", "drain_timeout_s", "cpus", "labels", "machines"),
)
#: Settings that follow from `machines`.
_OF_MACHINES = {"nnodes", "node_rank", "master_addr", "master_port"}
#: Former names of settings, each with the current name.
_RENAMED = {
    "tool_parser": "tool_call_parser",
    "context_length": "max_model_len",
    "num_blocks": "num_gpu_blocks_override",
    "max_batch_size": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "policy": "scheduling_policy",
    "num_draft_tokens": "num_speculative_tokens",
    "prefix_caching": "enable_prefix_caching",
    "no_prefix_caching": "enable_prefix_caching, with the opposite value",
    "cuda_graphs": "enforce_eager, with the opposite value",
    "num_threads": "threads",
    "drain_seconds": "drain_timeout_s",
    "db": "ledger",
    "replicas": "workers",
    "requests": "target_ongoing_requests",
    "nnodes": "machines",
}


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the gateway. Its workers share keys, limits and ledger as files, so all must run on one machine."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    # Gateway processes, or replicas on Ray.
    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 2
    # Only on Ray. True: the gateway itself listens on `port`, on one machine. False: Ray's slower proxies listen there.
    direct: bool = False
    # Key database. None: keys.sqlite3 in the state folder.
    keys: str | None = None
    # Ledger: a SQLite file, or a postgresql:// URL. None: gateway.sqlite3 in the state folder.
    ledger: str | None = None
    # Price file. `updraft gateway --help` explains this setting and the next three.
    prices: str | None = None
    # File with limits per key.
    limits: str | None = None
    # File with further nodes.
    nodes_file: str | None = None
    # Accepted `Host` headers.
    allowed_hosts: tuple[str, ...] = ()
    # Maximum number of requests that wait for a node.
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = 256
    # Time for streams to finish when a replica is replaced, in seconds.
    drain_timeout_s: Seconds = 60.0
    # CPU cores that Ray reserves for each replica.
    cpus: Amount = 0.5
    # Labels of the machine that the replicas run on.
    labels: dict[str, str] = {}


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on the number of nodes that serve a model. Without Ray, always `min` nodes run."""

    min: Positive = 1
    max: Positive = 1


class Autoscaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Targets and delays of Ray's autoscaling, which runs between `replicas.min` and `replicas.max` nodes."""

    # Target number of requests per node, running and waiting ones together.
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    # Target share of each node's KV cache in use.
    kv_usage: Fraction = 0.8
    # Time for which the load must exceed the targets before nodes are added, in seconds.
    upscale_delay_s: Seconds = 10.0
    # Time for which the load must stay below the targets before nodes are removed, in seconds.
    downscale_delay_s: Seconds = 120.0


class ModelDeployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model, and the nodes that serve it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    # Model name, as in `updraft node --model`.
    model: Annotated[str, msgspec.Meta(min_length=1)]
    # Draft model, as in `updraft node --draft`.
    draft: str | None = None
    kind: EngineKind = "updraft"
    # Engine mode and step time file, as in `updraft node`.
    mode: Mode = "balanced"
    step_costs: str | None = None
    # Settings of the engine, named like the options of `updraft node`; for vLLM or SGLang, their engine arguments.
    engine: dict[str, Any] = {}
    # Tool call format and chat template, as in `updraft node`.
    tool_call_parser: Literal["auto", FormatName] = "auto"
    chat_template: str | None = None
    replicas: Replicas = Replicas()
    autoscaling: Autoscaling = Autoscaling()
    # Extra replicas allowed during an update, in percent. If 0, old replicas stop before new ones start.
    max_surge_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 100
    # Time for requests in flight to finish when a node stops, in seconds.
    drain_timeout_s: Seconds = 60.0
    # CPU cores that Ray reserves for each node.
    cpus: Amount = 1.0
    # GPUs of each node, which share the model's layers. Ray reserves them.
    devices: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    # Machines of each node, with equal parts of its GPUs or processes; only on Ray, in a private network.
    machines: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # Labels of the machines that the nodes run on.
    labels: dict[str, str] = {}

    def engine_config(self) -> EngineConfig:
        """Return the engine's settings. Raises ConfigurationError."""
        known = {field.name for field in fields(EngineConfig)} - _OF_MACHINES
        for unknown in sorted(self.engine.keys() - known):
            current = _RENAMED.get(unknown)
            fault = f"the setting {unknown} is now {current}" if current else f"there is no setting {unknown!r}"
            raise ConfigurationError(f"models.{self.name}.engine: {fault}.", param="engine")
        device = self.engine.get("device", "cuda" if self.devices else "cpu")
        step_ms = self.engine.get("max_step_ms")
        step_ms = step_ms if isinstance(step_ms, int) else None
        limits = limits_from(absolute(self.step_costs), self.mode, step_ms, str(device))
        usual = {
            **settings_of(limits),
            "device": device,
            "block_size": usual_block_size(str(device)),
            "tensor_parallel": max(1, self.devices),
        }
        stages = self.engine.get("pipeline_parallel")
        if isinstance(stages, int) and stages > 0:
            usual["tensor_parallel"] = max(1, self.devices // stages)
        try:
            return msgspec.convert({**usual, **self.engine}, EngineConfig)
        except msgspec.ValidationError as error:
            words = plain_words(error, kind=EngineConfig)
            raise ConfigurationError(f"models.{self.name}.engine: {words}", param="engine") from error

    def check_foreign(self) -> None:
        """Check that the model has no settings that vLLM and SGLang would ignore. Raises ConfigurationError."""
        usual = ModelDeployment(name=self.name, model=self.model)
        if ignored := [name for name in _OWN if getattr(self, name) != getattr(usual, name)]:
            raise ConfigurationError(
                f"models.{self.name}: {ignored[0]} only applies to Updraft's engine. Use an engine argument of "
                f"{self.kind} in `engine` instead, or omit it.",
                param=ignored[0],
            )


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole configuration file."""

    models: Annotated[tuple[ModelDeployment, ...], msgspec.Meta(min_length=1)]
    gateway: GatewayConfig = GatewayConfig()
    # Allow unencrypted HTTP between machines, for callers and nodes. Set this only in private networks.
    insecure: bool = False
    # Any text. Changing this text replaces all replicas, for example to reload a changed model folder.
    revision: str = ""

    @property
    def keys(self) -> Path:
        return Path(self.gateway.keys or state_folder() / "keys.sqlite3").expanduser().absolute()

    @property
    def url(self) -> str:
        """URL of the gateway for nodes on the same machine, either direct or through Ray's proxy."""
        host = "127.0.0.1" if self.gateway.host in ("", "0.0.0.0", "::") else self.gateway.host
        return f"http://[{host}]:{self.gateway.port}" if ":" in host else f"http://{host}:{self.gateway.port}"

    def check(self) -> None:
        """Check values and combinations of settings; their types are already checked. Raises ConfigurationError."""
        check_encrypted(self.gateway.host, None, insecure=self.insecure)
        names = [model.name for model in self.models]
        if len(set(names)) < len(names) or "gateway" in names:
            raise ConfigurationError('Model names must be unique and must not be "gateway".', param="models")
        for model in self.models:
            if model.replicas.min > model.replicas.max:
                raise ConfigurationError(f"models.{model.name}.replicas: min must not exceed max.", param="replicas")
            if model.kind == "updraft":
                self._check_machines(model)
            else:
                model.check_foreign()

    def _check_machines(self, model: ModelDeployment) -> None:
        ranks = model.engine_config().num_ranks
        if ranks % model.machines or model.devices % model.machines:
            fault = f"{model.machines} machines need equal parts of {model.devices} devices and {ranks} processes"
        elif model.machines > 1 and not self.insecure:
            fault = "machines exchange data without encryption: set `insecure: true` in a private network"
        else:
            return
        raise ConfigurationError(f"models.{model.name}.machines: {fault}.", param="machines")


prepare_types(CloudConfig, EngineConfig)


def read_config(path: Path) -> CloudConfig:
    """Read and check a configuration file. Raises ConfigurationError, or MissingDependencyError without PyYAML."""
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("Reading YAML needs PyYAML: pip install '.[scale]' in a clone.") from error
    try:
        config = msgspec.convert(yaml.load(read_text(path, ConfigurationError), _loader(yaml)), CloudConfig)
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem).replace("did not find expected", "expected").replace("node content", "value")
        advice = "Check this line, and the brackets, quotes and indentation before it."
        raise ConfigurationError(f"{path}{line}: {problem}. {advice}") from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        words = plain_words(" ".join(str(error).split()), _RENAMED, kind=CloudConfig)
        raise ConfigurationError(f"{path}: {words}") from error
    config.check()
    return _resolved(config)


def _resolved(config: CloudConfig) -> CloudConfig:
    """Return the configuration with absolute paths, because replicas run in other working directories."""
    gateway = msgspec.structs.replace(
        config.gateway,
        **{
            name: _absolute(getattr(config.gateway, name))
            for name in ("keys", "ledger", "prices", "limits", "nodes_file")
        },
    )
    models = tuple(
        msgspec.structs.replace(
            model,
            step_costs=_absolute(model.step_costs),
            model=_whole_model(model.model),
            draft=model.draft and _whole_model(model.draft),
            chat_template=model.chat_template if model.chat_template == "chatml" else _absolute(model.chat_template),
        )
        for model in config.models
    )
    return msgspec.structs.replace(config, gateway=gateway, models=models)


def _absolute(place: str | None) -> str | None:
    """Return an absolute path; URLs and None stay unchanged."""
    return place if place is None or "://" in place else str(absolute(place))


def _whole_model(name: str) -> str:
    """Return an absolute path for a model's path; keep hub names. Raises ConfigurationError for an ambiguous name."""
    return str(absolute(name)) if is_node_path(name) else name


def _loader(yaml: Any) -> Any:
    """Return a safe YAML loader class that rejects duplicate keys; PyYAML would silently keep only the last one."""

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise yaml.MarkedYAMLError(None, None, f"duplicate key {twice[0]!r}", node.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def absolute(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser().absolute()
