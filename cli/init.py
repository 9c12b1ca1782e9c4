"""`updraft init`: asks for the first settings, and tries both models before it writes them."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..protocol.errors import ConfigurationError, UpdraftError, UpstreamError
from .shared import json_output, options, output

if TYPE_CHECKING:
    from ..router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class Answers:
    """Contents of the new settings file."""

    # Value of the setting `local`; None for no local model.
    local: str | None
    # Base URL of the cloud; None for no cloud.
    cloud_url: str | None
    cloud_model: str
    # Value of the setting `cloud_provider`; None to infer the provider from the URL.
    cloud_provider: str | None
    # API key of the cloud, and the user's file that holds the key, if any.
    key: str | None
    key_file: Path | None


def init(
    local: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="On-device model: smollm2, a file.gguf, hf:owner/repo:file.gguf, ollama:MODEL, a URL, or none.",
        ),
    ] = None,
    cloud_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Endpoint of the cloud, e.g. https://host/v1, or none.")
    ] = None,
    cloud_model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the cloud's model.")] = None,
    cloud_provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="API of the cloud: openai, azure, anthropic or gemini.")
    ] = None,
    api_key_file: Annotated[Path | None, options.key_file("the cloud's API key; not copied", panel="Cloud")] = None,
    api_key_env: Annotated[str | None, options.key_env("the cloud's API key; copied to a file", panel="Cloud")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use only the given options.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing settings; keep a copy of the file.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Choose a local model and a cloud, try both, and write the settings file.

    On a terminal, missing options are asked for. A key that you type is not shown, and is stored in a file that only
    you can read. The settings are written only if each model that you name answers a tiny request.

    \b
    Examples
      updraft init
      updraft init --yes --local smollm2
      updraft init --yes --local none --cloud-url https://host/v1 --cloud-model big --api-key-env HOST_KEY
    """
    from ..protocol import settings

    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    path = settings.config_file()
    _back_up(path, asks, force)
    local = _named(local, asks, "Local model", "smollm2")
    cloud = _named(cloud_url, asks, "Cloud, an OpenAI-compatible URL", "none")
    model = (cloud_model or "").strip()
    while cloud is not None and not model:
        if not asks:
            raise ConfigurationError("--cloud-url needs --cloud-model, the name of the cloud's model.")
        model = typer.prompt("Model of the cloud", err=True).strip()
    if cloud is None and (api_key_file or api_key_env or model or cloud_provider):
        raise ConfigurationError("--cloud-model, --cloud-provider, --api-key-file and --api-key-env need --cloud-url.")
    key = None if cloud is None else _key(api_key_file, api_key_env, asks)
    answers = Answers(_installed(local, yes=yes), cloud, model, cloud_provider, key, api_key_file)
    _try_models(answers)
    _write(answers, path)
    _print(f"The settings are in {path}. Try the models with updraft chat, or serve them to apps with updraft serve.")
    if answers.local and answers.cloud_url:
        from ..classifier.target import DEFAULT_QUALITY
        from ..classifier.training.gates import prompts_to_promise

        prompts = prompts_to_promise(DEFAULT_QUALITY, errs=True)
        _print(
            f"A target such as quality = {DEFAULT_QUALITY} needs a calibration of this pair. Put at least {prompts} of "
            "your own prompts into a file, one per line (past questions to your app, for example), and let both models "
            f"answer them:\n  updraft calibrate --live {prompts} --prompts FILE"
        )
    if as_json:
        facts = {"local": answers.local, "cloud_url": answers.cloud_url, "cloud_model": answers.cloud_model or None}
        json_output.show({"settings": str(path), **facts})


def _back_up(path: Path, asks: bool, force: bool) -> None:
    if not path.exists() or force:
        return
    if not asks:
        raise ConfigurationError(f"{path} exists already. --force replaces the file and keeps a copy of it.")
    typer.confirm(f"{path} exists already. Replace these settings?", default=False, abort=True, err=True)


def _named(answer: str | None, asks: bool, question: str, default: str) -> str | None:
    """Return the option's value, or else the user's answer to `question`. The value `none` becomes None."""
    if answer is None:
        answer = str(typer.prompt(question, default=default, err=True)) if asks else "none"
    return None if answer.strip() in ("", "none") else answer.strip()


def _installed(local: str | None, *, yes: bool) -> str | None:
    """Return the value of the setting `local` for this model. Download the model if it is on a hub or index."""
    from ..local_engine.store.library import Library
    from ..router.tiers.local_server.tier import server_address
    from .models.names import resolve

    if local is None or local == "pocket" or server_address(local) is not None:
        return local
    path = Path(resolve(local, yes=yes))
    return path.stem if path.parent == Library().folder else str(path)


def _key(key_file: Path | None, key_env: str | None, asks: bool) -> str | None:
    from ..router.config import read_key

    if key_file is not None:
        return read_key(key_file)
    if key_env is not None:
        return options.key_from(key_env, "--api-key-env")
    if not asks:
        return None
    question = "Key (not shown; empty for none)"
    return typer.prompt(question, default="", show_default=False, hide_input=True, err=True).strip() or None


def _try_models(answers: Answers) -> None:
    """Send each model a tiny request. Raises ConfigurationError without a model, UpstreamError if a model fails."""
    from ..router.config import RouterConfig

    if answers.local is None and answers.cloud_url is None:
        raise ConfigurationError("Name a model: --local, --cloud-url with --cloud-model, or both.")
    if answers.local is not None:
        _try("local", RouterConfig(local=answers.local), answers)
    if answers.cloud_url is not None:
        config = RouterConfig(
            local=None,
            cloud_url=answers.cloud_url,
            cloud_model=answers.cloud_model,
            cloud_provider=answers.cloud_provider or "auto",
            cloud_api_key=answers.key,
        )
        _try("cloud", config, answers)


def _try(tier: str, config: RouterConfig, answers: Answers) -> None:
    from openai import OpenAIError

    from .. import OpenAI
    from .shared.failures import message_of

    name = answers.local if tier == "local" else answers.cloud_model
    started = time.monotonic()
    try:
        with OpenAI(config=config) as client:
            client.chat.completions.create(
                model=tier, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
            )
    except (OpenAIError, UpdraftError) as error:
        reason = message_of(error)
        if answers.key:  # some servers repeat the key in error messages
            reason = reason.replace(answers.key, "(the key)")
        raise UpstreamError(f"The {tier} model {name} does not answer: {reason} Nothing was written.") from error
    _print(f"The {tier} model {name} answers ({time.monotonic() - started:.1f} s).")


def _write(answers: Answers, path: Path) -> None:
    from ..protocol import settings
    from ..protocol.safety.private_files import write_private

    key_file = None if answers.key_file is None else answers.key_file.expanduser().resolve()
    if answers.key is not None and key_file is None:
        key_file = _place_for(settings.state_folder() / "cloud_api_key", f"{answers.key}\n")
        write_private(key_file, f"{answers.key}\n")
        _print(f"The key is stored in {key_file}, which only you can read.")
    values = {"local": answers.local or "none"}
    if answers.cloud_url is not None:
        values |= {"cloud_url": answers.cloud_url, "cloud_model": answers.cloud_model}
        values |= {} if answers.cloud_provider is None else {"cloud_provider": answers.cloud_provider}
        values |= {} if key_file is None else {"cloud_api_key_file": str(key_file)}
    # JSON strings are valid TOML strings.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()]
    if path.exists():
        old = path.replace(_place_for(path.with_name(f"{path.name}.old")))
        _print(f"The old settings are in {old}; existing key files are unchanged.")
    write_private(path, "# Written by updraft init.\n" + "".join(lines))


def _place_for(path: Path, text: str | None = None) -> Path:
    """Return `path`, or a free numbered path if this file exists with other contents, which older settings may use."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    places = itertools.chain((path,), numbered)
    return next(place for place in places if not place.exists() or (text and place.read_bytes() == text.encode()))


def _print(line: str) -> None:
    output.echo(line, err=True)
