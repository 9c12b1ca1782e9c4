"""The YAML file of a cloud: one gateway, and the models behind it with their engines, replicas and machines."""

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
from ..engine.config import EngineConfig, Mode, settings_of, usual_block_size
from ..planning.mode_limits import limits_from

Positive = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1024)]
EngineKind = Literal["updraft", "vllm", "sglang"]
_OWN = (
    *("draft", "mode", "step_costs", "tool_parser", "chat_template"),
    *("max_surge_percent", "drain_seconds", "cpus", "labels"),
)


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoint. Its replicas share keys, limits and ledger by files, so they run on one machine."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    # Processes that answer.
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 2
    # On Ray, the gateway listens on `port` itself, on one machine: no proxy of Ray's costs time.
    direct: bool = False
    # Key database. None: keys.sqlite3 in the state folder.
    keys: str | None = None
    # Ledger: a SQLite file, or a postgresql:// URL. None: gateway.sqlite3 in the state folder.
    db: str | None = None
    # These four: as the options of `updraft gateway`.
    prices: str | None = None
    limits: str | None = None
    nodes_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    # Requests that wait for a node.
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = 256
    # Seconds that streams get to finish when a replica is replaced.
    drain_seconds: Seconds = 60.0
    # Cores that Ray reserves for each replica.
    cpus: Amount = 0.5
    # Labels of the machine that the replicas run on.
    labels: dict[str, str] = {}


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The number of nodes of a model. Plain processes are `min` in number."""

    min: Positive = 1
    max: Positive = 1


class Autoscaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ray's target between `replicas.min` and `replicas.max`."""

    # Running and waiting requests of each node.
    requests: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    # Share of the KV cache in use.
    kv_usage: Fraction = 0.8
    # Seconds for which more, or fewer, nodes must be called for.
    upscale_delay_s: Seconds = 10.0
    downscale_delay_s: Seconds = 120.0


class ModelDeployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model, and the nodes that serve it."""

    # Of the deployment.
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    # As `updraft node --model` takes it; so is the next.
    model: Annotated[str, msgspec.Meta(min_length=1)]
    draft: str | None = None
    kind: EngineKind = "updraft"
    # Both as the options of `updraft node`.
    mode: Mode = "balanced"
    step_costs: str | None = None
    # Settings of `EngineConfig`; of another kind of engine, its own keyword arguments.
    engine: dict[str, Any] = {}
    # Both as the options of `updraft node`.
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "mistral-args"] = "auto"
    chat_template: str | None = None
    replicas: Replicas = Replicas()
    autoscaling: Autoscaling = Autoscaling()
    # Replicas beyond the wanted ones while an update replaces old ones, in percent; 0 stops old ones first.
    max_surge_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 100
    # Seconds that requests in flight get to finish when a node stops.
    drain_seconds: Seconds = 60.0
    # Cores and GPUs that Ray reserves for each node. Several GPUs are of one machine.
    cpus: Amount = 1.0
    devices: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    # Labels of the machines that the nodes run on.
    labels: dict[str, str] = {}

    def engine_config(self) -> EngineConfig:
        """Raises ConfigurationError."""
        unknown = sorted(self.engine.keys() - {field.name for field in fields(EngineConfig)})
        if unknown:
            raise ConfigurationError(f"models.{self.name}.engine has no setting {unknown[0]!r}.", param="engine")
        device = self.engine.get("device", "cuda" if self.devices else "cpu")
        given = self.engine.get("max_step_ms")
        limits = limits_from(absolute(self.step_costs), self.mode, given if isinstance(given, int) else None)
        usual = {**settings_of(limits), "device": device, "block_size": usual_block_size(str(device))}
        try:
            return msgspec.convert({**usual, **self.engine}, EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"models.{self.name}.engine: {error}", param="engine") from error

    def check_foreign(self) -> None:
        """Raises ConfigurationError for what another kind of engine would not be told."""
        usual = ModelDeployment(name=self.name, model=self.model)
        if found := [name for name in _OWN if getattr(self, name) != getattr(usual, name)]:
            raise ConfigurationError(
                f"models.{self.name}: {found[0]} is for Updraft's engine. Say it to {self.kind} in `engine`, by its "
                "own words, or leave it out.",
                param=found[0],
            )


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    models: Annotated[tuple[ModelDeployment, ...], msgspec.Meta(min_length=1)]
    gateway: GatewayConfig = GatewayConfig()
    # Plain HTTP beyond this machine, to callers and between machines, as in a private network.
    insecure: bool = False
    # Any text. A new one replaces all replicas, as after an upgrade of Updraft, or of a model in its folder.
    revision: str = ""

    @property
    def keys(self) -> Path:
        return Path(self.gateway.keys or state_folder() / "keys.sqlite3").expanduser().absolute()

    @property
    def url(self) -> str:
        """Of the gateway, for nodes on machines where it, or Ray's proxy to it, listens."""
        host = "127.0.0.1" if self.gateway.host in ("", "0.0.0.0", "::") else self.gateway.host
        return f"http://[{host}]:{self.gateway.port}" if ":" in host else f"http://{host}:{self.gateway.port}"

    def check(self) -> None:
        """Raises ConfigurationError for what the types do not rule out."""
        check_encrypted(self.gateway.host, None, insecure=self.insecure)
        names = [model.name for model in self.models]
        if len(set(names)) < len(names) or "gateway" in names:
            raise ConfigurationError("Each model needs a name of its own, and none is called gateway.", param="models")
        for model in self.models:
            if model.replicas.min > model.replicas.max:
                raise ConfigurationError(f"models.{model.name}.replicas: min is above max.", param="replicas")
            if model.kind == "updraft":
                model.engine_config()
            else:
                model.check_foreign()


prepare_types(CloudConfig, EngineConfig)


def read_config(path: Path) -> CloudConfig:
    """Raises ConfigurationError, which says where in the file; MissingDependencyError without PyYAML."""
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("A cloud's file needs PyYAML: pip install '.[scale]' in a clone.") from error
    try:
        config = msgspec.convert(yaml.load(read_text(path, ConfigurationError), _loader(yaml)), CloudConfig)
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    config.check()
    return _resolved(config)


def _resolved(config: CloudConfig) -> CloudConfig:
    """The same with whole paths: replicas run in folders of their own."""
    gateway = msgspec.structs.replace(
        config.gateway,
        **{name: _whole(getattr(config.gateway, name)) for name in ("keys", "db", "prices", "limits", "nodes_file")},
    )
    models = tuple(
        msgspec.structs.replace(
            model,
            step_costs=_whole(model.step_costs),
            model=_whole_model(model.model),
            draft=model.draft and _whole_model(model.draft),
            chat_template=model.chat_template if model.chat_template == "chatml" else _whole(model.chat_template),
        )
        for model in config.models
    )
    return msgspec.structs.replace(config, gateway=gateway, models=models)


def _whole(place: str | None) -> str | None:
    """An address stays as it is."""
    return place if place is None or "://" in place else str(absolute(place))


def _whole_model(name: str) -> str:
    """Raises ConfigurationError for what is a path and a name."""
    return str(absolute(name)) if is_node_path(name) else name


def _loader(yaml: Any) -> Any:
    """Of plain values only. A key that is there twice is an error: the first would be dropped in silence."""

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise yaml.MarkedYAMLError(None, None, f"{twice[0]!r} is there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def absolute(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser().absolute()
