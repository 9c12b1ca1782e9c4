"""The options that commands share, and what they mean together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    """The tier that answers; the values are the model names that the router knows."""

    AUTO = "auto"
    LOCAL = "local"
    CLOUD = "cloud"


Local = Annotated[
    str | None,
    typer.Option(
        "--local",
        metavar="MODEL",
        help="On-device model: a file.gguf, a pulled model's name, hf:owner/repo:file.gguf (downloaded once), "
        "pocket (the demo model in the package), ollama:MODEL, the URL of a server here, or none.",
    ),
]
Quality = Annotated[
    float | None,
    typer.Option("--quality", metavar="SHARE", help="Share of the cloud's quality to keep, above 0 and at most 1."),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template", metavar="PATH", help="Jinja file to use instead of the model's own chat template, or chatml."
    ),
]
Confidence = Annotated[
    float, typer.Option("--confidence", min=0.5, max=0.999, help="With which the target is promised.")
]
PolicyFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        file_okay=False,
        help="Write the policy here. [where the router looks for this pair's]",
    ),
]


#: Fields of `Pair` that commands go without which calibrate: a plain threshold, and how the models are run.
CALIBRATED = ("confidence", "confidence_signal", "tool_parser", "chat_template")


@dataclass(frozen=True, slots=True)
class Pair:
    """The two models a command was asked to use, and its target; None means "as configured"."""

    local: Local = None
    cloud: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Endpoint to escalate to, e.g. https://host/v1. "
            "With --local pocket and none the packaged cloud model is started on this machine.",
        ),
    ] = None
    cloud_model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to ask for at --cloud.")] = None
    cloud_provider: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose API --cloud speaks: openai, azure, anthropic, gemini, or an installed one. [by its host]",
        ),
    ] = None
    cloud_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable that holds the key of --cloud.")
    ] = None
    quality: Quality = None
    cloud_share: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Instead of a quality: escalate at most this share, 0 to 1.")
    ] = None
    cost: Annotated[
        float | None, typer.Option(metavar="USD", help="Instead of a quality: at most this per 1,000 requests.")
    ] = None
    promise: Annotated[
        Promise | None,
        typer.Option(
            help="The target holds with the calibration's confidence (the default), or in the "
            "mean over calibrations, which escalates less."
        ),
    ] = None
    confidence: Annotated[
        float | None,
        typer.Option(
            metavar="PROBABILITY",
            help="Instead of a calibrated target: escalate where the local model was less sure than this.",
        ),
    ] = None
    confidence_signal: Annotated[
        ConfidenceSignal | None,
        typer.Option(
            help="What --confidence goes by: token probability (the default), entropy, "
            "or the margin over the runner-up."
        ),
    ] = None
    tool_parser: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="How the local model writes tool calls: hermes, llama3, mistral or mistral-args. "
            "[by its chat template]",
        ),
    ] = None
    chat_template: ChatTemplate = None

    def config(self) -> RouterConfig:
        """The user's settings with these flags on top. Raises ConfigurationError."""
        from ...router.settings_sources import load_config
        from ..models.names import resolve

        flags = {name: value for name, value in asdict(self).items() if value is not None}
        if (url := flags.pop("cloud", None)) is not None:
            flags["cloud_url"] = url
        if (variable := flags.pop("cloud_key_env", None)) is not None:
            flags["cloud_api_key"] = key_from(variable, "--cloud-key-env")
        found = load_config(flags)
        if self.local is None:
            return found
        try:
            return load_config({**flags, "local": resolve(self.local)})
        except (ModelLoadError, DownloadError, OfflineError):
            if found.cloud_url is None or found.offline:
                raise
            return found  # the router warns of it, and the cloud answers


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of what an engine computes at a time."""

    mode: Annotated[
        Literal["latency", "balanced", "throughput"],
        typer.Option(help="Sets the limits below: for quick streams, for tokens per second of all, or between."),
    ] = "balanced"
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Requests computed together. [as --mode]")] = None
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens computed in one step, over all requests. [as --mode]")
    ] = None
    max_step_ms: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts and drafts are cut to it: streams move between steps. [as --mode]"),
    ] = None


def key_from(variable: str, option: str) -> str:
    """The key in an environment variable that `option` names. Raises ConfigurationError if it is not set."""
    key = os.environ.get(variable, "").strip()  # a file's line feed comes along with some ways to read it
    if not key:
        raise ConfigurationError(f"{option} {variable}: that environment variable is not set.")
    return key


def cloud_model_of(config: RouterConfig) -> str:
    """The cloud half of the pair that a policy is for. Raises ConfigurationError if it is not named."""
    if not config.cloud_model:
        raise ConfigurationError(
            "A policy is for a pair: name its cloud model with --cloud-model.", param="cloud_model"
        )
    return config.cloud_model


@contextmanager
def with_cloud(config: RouterConfig, say: Callable[[str], None], *, nodes: int = 1) -> Iterator[RouterConfig]:
    """The configuration to run with: the packaged cloud is started for the packaged local model, if none was named.

    It is stopped when the block ends. Without torch or pyzmq no engine can be started: then the local model is alone,
    as it is with 0 `nodes`. `say` also hears of what a first use on this machine takes.
    """
    with first_uses_reported(say), _packaged_cloud(config, say, nodes) as running:
        yield running


@contextmanager
def _packaged_cloud(config: RouterConfig, say: Callable[[str], None], nodes: int) -> Iterator[RouterConfig]:
    if not nodes or config.cloud_url is not None or config.offline or config.local != "pocket":
        yield config
        return
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("zmq") is None:
        say("Local answers only: no cloud was named. The packaged one needs pip install '.[cloud]' in a clone.")
        yield config
        return
    from .processes import signals_as_interrupts
    from .stack import pocket_cloud

    with signals_as_interrupts(), pocket_cloud(nodes=nodes, say=say) as cloud:
        yield replace(
            config,
            cloud_url=cloud.base_url,
            cloud_api_key=cloud.api_key,
            cloud_model="pocket-large",
            cloud_continues=True,
        )


def key_database(given: Path | None) -> Path:
    """The file of a gateway's keys: as said, or in the state folder."""
    from ...protocol.settings import state_folder

    return given or state_folder() / "keys.sqlite3"


def node_key(file: Path | None) -> str | None:
    """The key between a gateway and its nodes. Raises ConfigurationError."""
    return (os.environ.get("UPDRAFT_NODE_API_KEY") or None) if file is None else key_in(file)


def key_in(file: Path) -> str:
    from ...protocol.unicode_forms import read_text

    try:
        key = read_text(file, ConfigurationError).strip()
    except OSError as error:
        raise ConfigurationError(f"Cannot read the key in {file}: {error.strerror}.") from error
    if not key:
        raise ConfigurationError(f"{file} is empty: write the key into it.")
    return key
