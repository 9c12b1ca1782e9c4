"""Options that several commands share, and the configuration that they select."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...classifier.target import Promise
from ...protocol.errors import ConfigurationError, DownloadError, ModelLoadError, OfflineError
from ...protocol.requests import ConfidenceSignal
from .watch import first_uses_reported

if TYPE_CHECKING:
    from ...router.config import RouterConfig

SERVE_PORT = 4114
NODE_PORT = 4116
GATEWAY_PORT = 4115
MAX_TASKS = 20_000


class Tier(StrEnum):
    """Tier that answers. The values are the router's model names."""

    AUTO = "auto"
    LOCAL = "local"
    CLOUD = "cloud"


def key_env(key: str, name: str = "--api-key-env", *, note: str = "", panel: str | None = None) -> Any:
    return typer.Option(name, metavar="NAME", help=f"Environment variable with {key}.{note}", rich_help_panel=panel)


def key_file(key: str, name: str = "--api-key-file", *, panel: str | None = None) -> Any:
    return typer.Option(name, metavar="FILE", help=f"File with {key}.", rich_help_panel=panel)


Local = Annotated[
    str | None,
    typer.Option(
        "--local",
        metavar="MODEL",
        help="On-device model: a file.gguf, a pulled model's name, hf:owner/repo:file.gguf (downloaded once), "
        "pocket (the packaged demo model), ollama:MODEL, the URL of a server on this machine, or none.",
    ),
]
Quality = Annotated[
    float | None,
    typer.Option("--quality", metavar="SHARE", help="Share of the cloud's quality to keep, above 0 and at most 1."),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template", metavar="PATH", help="Jinja file, or chatml, that replaces the model's own chat template."
    ),
]
PromiseLevel = Annotated[
    float,
    typer.Option("--promise-level", min=0.5, max=0.999, help="Probability with which a promised target holds."),
]
PolicyFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        file_okay=False,
        help="Folder to write the policy to. [the folder in which the router looks for this pair's policy]",
    ),
]


#: Options of `Pair` that `--help` shows. The other options of `Pair` are usually set in the settings file.
USUAL = ("--local", "--cloud-url", "--cloud-model", "--api-key-env", "--quality", "--confidence", "--promise-level")
#: Fields of `Pair` for which commands that calibrate have no options.
CALIBRATED = ("confidence", "confidence_signal", "tool_call_parser", "chat_template")


@dataclass(frozen=True, slots=True)
class Pair:
    """Options that choose the local model, the cloud and the target; None keeps the configured value."""

    local: Local = None
    cloud_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Endpoint to escalate to, e.g. https://host/v1. "
            "Without a URL, commands that run --local pocket start the packaged cloud model on this machine.",
        ),
    ] = None
    cloud_model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model at --cloud-url.")] = None
    cloud_provider: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="API of --cloud-url: openai, azure, anthropic, gemini, or an installed provider. [from its host]",
        ),
    ] = None
    api_key_env: Annotated[str | None, key_env("the API key of --cloud-url", panel="Cloud")] = None
    api_key_file: Annotated[Path | None, key_file("the API key of --cloud-url", panel="Cloud")] = None
    quality: Quality = None
    cloud_share: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Target instead of --quality: largest share to escalate.")
    ] = None
    cost: Annotated[
        float | None, typer.Option(metavar="USD", help="Target instead of --quality: highest cost of 1,000 requests.")
    ] = None
    promise: Annotated[
        Promise | None,
        typer.Option(
            help="Kind of guarantee: the target holds with the policy's promise level (net, the default), likewise "
            "without counting what only the device gets right (no-loss), or on average over calibrations (mean)."
        ),
    ] = None
    confidence: Annotated[
        float | None,
        typer.Option(
            metavar="PROBABILITY", help="Instead of a calibrated target: escalate answers below this confidence."
        ),
    ] = None
    confidence_signal: Annotated[
        ConfidenceSignal | None,
        typer.Option(
            help="Signal that --confidence is compared with: token probability (the default), entropy, "
            "or the margin over the second-best token."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Format of the local model's tool calls: hermes, llama3, mistral, mistral-args, qwen3_coder, "
            "glm45 or gemma4. [detected from its chat template]",
        ),
    ] = None
    chat_template: ChatTemplate = None

    def config(self) -> RouterConfig:
        """Return the user's settings, overridden by these options. Raises ConfigurationError."""
        from ...router.settings_sources import load_config
        from ..models.names import resolve

        flags = {name: value for name, value in asdict(self).items() if value is not None}
        if (key := given_key(flags.pop("api_key_env", None), flags.pop("api_key_file", None))) is not None:
            flags["cloud_api_key"] = key
        config = load_config(flags)
        if self.local is None:
            return config
        try:
            return load_config({**flags, "local": resolve(self.local)})
        except (ModelLoadError, DownloadError, OfflineError):
            if config.cloud_url is None or config.offline:
                raise
            return config  # the router warns about the missing model, and the cloud answers


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Batching limits of an engine."""

    mode: Annotated[
        Literal["latency", "balanced", "throughput"],
        typer.Option(help="Preset for the limits below: low latency per stream, high total throughput, or a balance."),
    ] = "balanced"
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", min=1, help="Maximum requests in one step. [by --mode]")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", min=1, help="Maximum tokens in one step. [by --mode]")
    ] = None
    max_step_ms: Annotated[
        int | None,
        typer.Option(min=1, help="Target time per step; long prefills and drafts are chunked to fit. [by --mode]"),
    ] = None


def given_key(variable: str | None, file: Path | None, option: str = "--api-key") -> str | None:
    """Return the key of `{option}-env` or `{option}-file`, if one is given. Raises ConfigurationError."""
    if variable is not None and file is not None:
        raise ConfigurationError(f"Give {option}-env or {option}-file, not both.")
    if variable is not None:
        return key_from(variable, f"{option}-env")
    if file is None:
        return None
    from ...router.config import read_key

    return read_key(file)


def key_from(variable: str, option: str) -> str:
    """Return the key in the environment variable that `option` names. Raises ConfigurationError if it is not set."""
    if not (key := os.environ.get(variable, "").strip()):  # a key read from a file often ends in a line feed
        raise ConfigurationError(f"{option} {variable}: this environment variable is not set.")
    return key


def cloud_model_of(config: RouterConfig) -> str:
    """Return the name of the pair's cloud model. Raises ConfigurationError if the settings name no cloud model."""
    if not config.cloud_model:
        raise ConfigurationError(
            "A policy is made for a pair of models: name the cloud model with --cloud-model.", param="cloud_model"
        )
    return config.cloud_model


@contextmanager
def with_cloud(config: RouterConfig, say: Callable[[str], None], *, nodes: int = 1) -> Iterator[RouterConfig]:
    """Yield the configuration to run with. The packaged local model gets the packaged cloud if no cloud is configured.

    The packaged cloud stops when the block ends. It is not started with 0 `nodes`, offline, or without torch and pyzmq.
    `say` receives progress messages, including those of the local engine's first use on this machine.
    """
    with first_uses_reported(say), _packaged_cloud(config, say, nodes) as running:
        yield running


@contextmanager
def _packaged_cloud(config: RouterConfig, say: Callable[[str], None], nodes: int) -> Iterator[RouterConfig]:
    if not nodes or config.cloud_url is not None or config.offline or config.local != "pocket":
        yield config
        return
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("zmq") is None:
        say("Local answers only: no cloud is set. The packaged cloud needs pip install '.[cloud]' in a clone.")
        yield config
        return
    from .pocket_cloud import pocket_cloud
    from .processes import signals_as_interrupts

    with signals_as_interrupts(), pocket_cloud(nodes=nodes, say=say) as cloud:
        yield replace(
            config,
            cloud_url=cloud.base_url,
            cloud_api_key=cloud.api_key,
            cloud_model="pocket-large",
            cloud_continues=True,
        )


def key_database(path: Path | None) -> Path:
    """Return the path of the gateway's key database: `path`, or the default in the state folder."""
    from ...protocol.settings import state_folder

    return path or state_folder() / "keys.sqlite3"


def node_key(variable: str | None, file: Path | None, option: str = "--api-key") -> str | None:
    """Return the nodes' key, from `variable` or `file`, else UPDRAFT_NODE_API_KEY. Raises ConfigurationError."""
    return given_key(variable, file, option) or os.environ.get("UPDRAFT_NODE_API_KEY") or None
