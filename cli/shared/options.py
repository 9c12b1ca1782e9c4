"""The options that commands share, and what they mean together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...classifier.target import Promise as PromiseName
from ...protocol.errors import ConfigurationError
from ...protocol.requests import ConfidenceSignal as SignalName
from .watch import first_uses_reported

if TYPE_CHECKING:
    from ...cloud_engine.node.registration import RegistrationOptions
    from ...protocol.http.tls import TlsFiles
    from ...router.config import RouterConfig

SERVE_PORT = 4114
NODE_PORT = 4116
GATEWAY_PORT = 4115
MAX_TASKS = 20_000


class Tier(StrEnum):
    """Who answers; the values are the model names that the router knows."""

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
Cloud = Annotated[
    str | None,
    typer.Option(
        "--cloud",
        metavar="URL",
        help="Endpoint to escalate to, e.g. https://host/v1. "
        "With --local pocket and none the packaged cloud model is started on this machine.",
    ),
]
CloudModel = Annotated[str | None, typer.Option("--cloud-model", metavar="NAME", help="Model to ask for at --cloud.")]
CloudProvider = Annotated[
    str | None,
    typer.Option(
        "--cloud-provider",
        metavar="NAME",
        help="Whose API --cloud speaks: openai, azure, anthropic, gemini, or an installed one. [by its host]",
    ),
]
CloudKeyEnv = Annotated[
    str | None,
    typer.Option("--cloud-key-env", metavar="VAR", help="Environment variable that holds the key of --cloud."),
]
Quality = Annotated[
    float | None,
    typer.Option("--quality", metavar="SHARE", help="Share of the cloud's quality to keep, above 0 and at most 1."),
]
CloudShare = Annotated[
    float | None,
    typer.Option("--cloud-share", metavar="SHARE", help="Instead of a quality: escalate at most this share, 0 to 1."),
]
Cost = Annotated[
    float | None,
    typer.Option("--cost", metavar="USD", help="Instead of a quality: at most this per 1,000 requests."),
]
PlainConfidence = Annotated[
    float | None,
    typer.Option(
        "--confidence",
        metavar="PROBABILITY",
        help="Instead of a calibrated target: escalate where the local model was less sure than this.",
    ),
]
ConfidenceSignal = Annotated[
    SignalName | None,
    typer.Option(
        "--confidence-signal",
        help="What --confidence goes by: token probability (the default), entropy, or the margin over the runner-up.",
    ),
]
Promise = Annotated[
    PromiseName | None,
    typer.Option(
        "--promise",
        help="The target holds with the calibration's confidence (the default), or in the "
        "mean over calibrations, which escalates less.",
    ),
]
ToolParser = Annotated[
    str | None,
    typer.Option(
        "--tool-parser",
        metavar="FORMAT",
        help="How the local model writes tool calls: hermes, llama3, mistral or mistral-args. [by its chat template]",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="PATH",
        help="Jinja file to use instead of the model's own chat template, or chatml.",
    ),
]
Mode = Annotated[
    Literal["latency", "balanced", "throughput"],
    typer.Option("--mode", help="Sets the limits below: for quick streams, for tokens per second of all, or between."),
]
StepCosts = Annotated[
    Path | None,
    typer.Option(
        "--step-costs",
        metavar="JSON",
        help="Times of steps, from which --mode sets them: updraft bench engine --only steps --json PATH.",
    ),
]
MaxBatchSize = Annotated[
    int | None, typer.Option("--max-batch-size", min=1, help="Requests computed together. [as --mode]")
]
TokenBudget = Annotated[
    int | None,
    typer.Option("--token-budget", min=1, help="Tokens computed in one step, over all requests. [as --mode]"),
]
MaxStepMs = Annotated[
    int | None,
    typer.Option(
        "--max-step-ms", min=1, help="Prompts and drafts are cut to it: streams move between steps. [as --mode]"
    ),
]
Confidence = Annotated[
    float,
    typer.Option("--confidence", min=0.5, max=0.999, help="With which the target is promised."),
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


@dataclass(frozen=True, slots=True)
class Pair:
    """The two models a command was asked to use; None means "as configured"."""

    local: str | None = None
    cloud: str | None = None
    cloud_model: str | None = None
    cloud_key_env: str | None = None
    quality: float | None = None
    cloud_share: float | None = None
    cost: float | None = None
    promise: PromiseName | None = None
    confidence: float | None = None
    confidence_signal: SignalName | None = None
    tool_parser: str | None = None
    chat_template: str | None = None
    cloud_provider: str | None = None

    def config(self) -> RouterConfig:
        """The user's settings with these flags on top. Raises ConfigurationError."""
        from ...router.settings_sources import load_config
        from ..models.names import resolve

        flags: dict[str, Any] = {
            "local": None if self.local is None else resolve(self.local),
            "cloud_url": self.cloud,
            "cloud_model": self.cloud_model,
            "cloud_provider": self.cloud_provider,
            "cloud_api_key": None if self.cloud_key_env is None else key_from(self.cloud_key_env, "--cloud-key-env"),
            "quality": self.quality,
            "cloud_share": self.cloud_share,
            "cost": self.cost,
            "promise": self.promise,
            "confidence": self.confidence,
            "confidence_signal": self.confidence_signal,
            "tool_parser": self.tool_parser,
            "chat_template": self.chat_template,
        }
        return load_config({name: value for name, value in flags.items() if value is not None})


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

    It is stopped when the block ends. Without torch or pyzmq no engine can be started: then the local model is alone.
    `say` also hears of what a first use on this machine takes.
    """
    with first_uses_reported(say), _packaged_cloud(config, say, nodes) as running:
        yield running


@contextmanager
def without_cloud(config: RouterConfig, say: Callable[[str], None]) -> Iterator[RouterConfig]:
    """As `with_cloud` where no cloud will be asked."""
    with first_uses_reported(say):
        yield config


@contextmanager
def _packaged_cloud(config: RouterConfig, say: Callable[[str], None], nodes: int) -> Iterator[RouterConfig]:
    if config.cloud_url is not None or config.offline or config.local != "pocket":
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
    """Where a gateway's keys are: as said, or in the state folder."""
    from ...protocol.settings import state_folder

    return given or state_folder() / "keys.sqlite3"


def tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """The files of --tls-cert and --tls-key. Raises ConfigurationError for one without the other."""
    from ...protocol.http.tls import TlsFiles

    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigurationError("--tls-cert and --tls-key go together: give both.", param="tls_cert")
    return TlsFiles(certificate, key)


def registration(gateway: str | None, key_file: Path | None, url: str | None) -> RegistrationOptions | None:
    """What --register and its companions say. Raises ConfigurationError for one without the other."""
    from ...cloud_engine.node.registration import RegistrationOptions

    if gateway is None:
        if key_file is not None or url is not None:
            raise ConfigurationError("--register-key-file and --register-as go with --register.", param="register")
        return None
    if key_file is None:
        raise ConfigurationError("--register needs --register-key-file.", param="register_key_file")
    return RegistrationOptions(gateway, _key_in(key_file), url)


def node_key(file: Path | None) -> str | None:
    """The key between a gateway and its nodes. Raises ConfigurationError."""
    return (os.environ.get("UPDRAFT_NODE_API_KEY") or None) if file is None else _key_in(file)


def _key_in(file: Path) -> str:
    from ...protocol.unicode_forms import read_text

    try:
        key = read_text(file, ConfigurationError).strip()
    except OSError as error:
        raise ConfigurationError(f"Cannot read the key in {file}: {error.strerror}.") from error
    if not key:
        raise ConfigurationError(f"{file} is empty: write the key into it.")
    return key
