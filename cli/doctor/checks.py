"""Checks of `updraft doctor`: each tests one thing, does not raise, and names the next step."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import msgspec

from ...local_engine.llama.build import REBUILD_COMMAND
from ...local_engine.machine.machine import this_machine
from ...model_files.identity import file_sha256
from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError, MissingDependencyError, ModelLoadError, UpdraftError
from ...protocol.safety.private_files import has_file
from ...protocol.safety.redaction import shown_url
from ...protocol.safety.system import child_environment, python_command
from ..shared.options import SERVE_PORT
from .device_checks import (
    check_kernels,
    check_memory,
    check_other_load,
    check_processor,
    check_tuning,
    unused_instruction_sets,
)
from .findings import Check

PROBE_TIMEOUT_S = 180.0
PACKAGES = {
    "core": ("openai", "httpx", "fastapi", "uvicorn", "msgspec", "tokenizers"),
    "edge": ("llama-cpp-python", "onnxruntime", "huggingface-hub"),
    "cloud": ("torch", "safetensors", "pyzmq"),
}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


prepare_types(_Models)


def run_checks(cloud: str | None, key: str | None, begin: Callable[[str], None]) -> Iterator[Check]:
    """Run all checks and yield each result at once. `begin` receives a description of each slow check."""
    from ...router.settings_sources import load_config
    from ..policy import check_policies

    yield Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    for group in PACKAGES:
        yield check_packages(group)
    if _version("llama-cpp-python"):
        begin("generating a few tokens with llama.cpp, in a separate process")
        yield from check_llama()
        begin("checking this machine")
        machine = this_machine()
        yield check_processor(machine)
        yield check_other_load(machine)
        yield check_memory(machine)
        yield check_tuning()
    if _version("torch"):
        begin("importing torch, in a separate process")
        yield check_torch()
    begin("reading the pocket models")
    yield check_models()
    yield check_policy()
    yield check_settings()
    yield from check_ledger()
    yield check_tiers()
    with suppress(UpdraftError):  # `check_settings` reports this error
        yield from check_policies(load_config())
    yield check_port(SERVE_PORT)
    begin("trying the local model")
    yield from check_local()
    url, key = cloud_to_ask(cloud, key)
    if url:
        begin(f"asking {shown_url(url)} for its models")
        yield check_cloud(url, key)


def check_packages(group: str) -> Check:
    versions = {name: _version(name) for name in PACKAGES[group]}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if not version]
    if not missing:
        return Check(group, "ok", installed)
    package = "." if group == "core" else f"'.[{group}]'"
    status = "fail" if group == "core" else "warn"
    # Plain builds of llama.cpp are known to crash, so the fix builds llama.cpp with the right options first.
    first = f"{REBUILD_COMMAND} && " if "llama-cpp-python" in missing else ""
    return Check(group, status, f"missing: {', '.join(missing)}", f"{first}pip install {package} in a clone of Updraft")


def check_llama() -> Iterator[Check]:
    """Generate a few tokens in a separate process, because a wrong build of llama.cpp crashes on its first token."""
    from ...embedded import pocket
    from ...local_engine.build_check import probe

    report = probe(pocket.pocket_small_gguf(), timeout_s=PROBE_TIMEOUT_S)
    if report.status != "ok":
        yield Check("llama.cpp", "fail", report.detail, report.advice)
        return
    unused = unused_instruction_sets(this_machine(), report.system_info)
    if report.advice:
        yield Check("llama.cpp", "warn", report.detail, report.advice)
    elif unused:
        advice = f"rebuild llama.cpp for this processor: {REBUILD_COMMAND}"
        yield Check("llama.cpp", "warn", f"{report.detail} It does not use {', '.join(unused)}.", advice)
    else:
        yield Check("llama.cpp", "ok", report.detail)
    yield check_kernels(report.kernels)


def check_torch() -> Check:
    """Import torch in a separate process, because the import takes seconds and a broken build can crash."""
    program = (
        "import torch; gpu = torch.cuda.is_available() and torch.cuda.get_device_name();"
        "print(torch.__version__, 'on', gpu or f'the CPU, {torch.get_num_threads()} threads')"
    )
    done = subprocess.run(
        python_command("-c", program), env=child_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return Check("torch", "ok", done.stdout.strip())
    lines = done.stderr.strip().splitlines() or [f"import torch exited with code {done.returncode}"]
    return Check("torch", "fail", lines[-1], "pip install --force-reinstall torch")


def check_models() -> Check:
    """Check that the packaged pocket models are present, and report their sizes and hashes."""

    def look() -> str:
        from ...embedded import pocket

        files = [pocket.pocket_small_gguf(), *sorted(pocket.pocket_large_folder().glob("*.safetensors"))]
        return ", ".join(
            f"{path.name} {path.stat().st_size / 1e6:.1f} MB sha256 {file_sha256(path)[:12]}" for path in files
        )

    return _reported("pocket models", look, "reinstall: pip install --force-reinstall . in a clone of Updraft")


def check_policy() -> Check:
    """Check that the packaged routing policy loads, and report its pair and hash."""

    def look() -> str:
        from ...classifier.policy.policy import Policy
        from ...embedded import pocket

        folder = pocket.policy_folder()
        pair = " with ".join(Policy.load(folder).models.values())
        return f"for the packaged pair, {pair}; sha256 {file_sha256(folder / 'policy.json')[:12]}"

    return _reported(
        "policy", look, "pip install '.[edge]' in a clone of Updraft, or recreate it: python -m updraft.embedded.policy"
    )


def check_settings() -> Check:
    """Check that the settings file and UPDRAFT_* variables are readable and hold known settings only."""

    def look() -> str:
        from ...protocol.settings import config_file
        from ...router.settings_sources import load_config

        load_config()
        path = config_file()
        return str(path) if has_file(path) else f"defaults and UPDRAFT_* variables; there is no file {path}"

    return _reported("settings", look, "correct the setting that the message names")


def check_ledger() -> Iterator[Check]:
    """Check that the router can write its ledger. Creates no file, because another user may run the router later."""
    from ...router.accounting.ledger import Ledger
    from ...router.settings_sources import load_config

    def look() -> str:
        if path is None:
            return "off"
        if has_file(path):
            with closing(Ledger(path)) as ledger:
                ledger.verify()
            return f"{path} is intact"
        folder = next(parent for parent in path.absolute().parents if os.access(parent, os.F_OK))
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{path} cannot be written, so requests go unrecorded: {folder} is not writable")
        return f"{path} is created with the first request"

    with suppress(UpdraftError):  # `check_settings` reports this error
        path = load_config().ledger
        yield _reported("ledger", look, "set ledger or UPDRAFT_HOME to a folder that you can write to")


def check_tiers() -> Check:
    """Check that models are configured and that the pair has a policy; warn if not, as on any new installation."""
    from ...router.factory import has_policy
    from ...router.settings_checks import check_settings
    from ...router.settings_sources import load_config

    uncalibrated = False

    def look() -> str:
        nonlocal uncalibrated
        config = load_config()
        check_settings(config)
        pair = config.local is not None and config.cloud_url is not None
        uncalibrated = pair and config.policy == "auto" and config.confidence is None and not has_policy(config)
        rest = '; no policy for this pair, so model="auto" always goes to the cloud' if uncalibrated else ""
        return f"local: {config.local or 'none'}; cloud: {config.cloud_url or 'none'}{rest}"

    check = _reported("tiers", look, "updraft pull fetches a local model; docs/quickstart.md sets up both tiers")
    if uncalibrated:
        check = replace(check, fix="updraft calibrate makes a policy from your prompts (docs/guides/calibrate.md)")
    return replace(check, status="warn") if check.status == "fail" or uncalibrated else check


def check_port(port: int) -> Check:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check("port", "warn", f"{port} for `updraft serve`: {error.strerror}", "use updraft serve --port 0")
    return Check("port", "ok", f"{port} is free for `updraft serve`")


def cloud_to_ask(cloud: str | None, key: str | None) -> tuple[str | None, str | None]:
    """Return URL and key of the given cloud, else of the settings' cloud; (None, None) if the settings are invalid."""
    from ...router.settings_sources import load_config

    if cloud:
        return cloud, key
    try:
        config = load_config()
    except UpdraftError:
        return None, None
    return config.cloud_url, config.cloud_api_key


def check_local() -> Iterator[Check]:
    """Check that the local model file loads, or that the local server answers and gives log-probabilities."""
    from ...router.factory import has_model_file, model_file, open_local, served_model
    from ...router.settings_sources import load_config

    with suppress(ConfigurationError):  # `check_settings` reports this error
        config = load_config()

        def load() -> str:
            open_local(config).close()
            return f"{model_file(config)} loads"

        if has_model_file(config):
            yield _reported("local model", load, "correct the setting local, or fetch a model with updraft pull")
        try:
            served = served_model(config)
        except ModelLoadError as error:
            yield Check("local server", "fail", error.message, "start the server, or correct local and local_model")
            return
        if served is None:
            return
        facts = f"{served.address.url}: {served.name}, {served.context_length} tokens of context"
        if served.has_signals:
            yield Check("local server", "ok", f"{facts}, with log-probabilities")
        else:
            without = f'{facts}, without log-probabilities: it only answers requests for model="local"'
            yield Check("local server", "warn", without, "use a server with log-probabilities, such as llama-server")


def check_cloud(url: str, key: str | None) -> Check:
    import httpx

    from ...router.config import RouterConfig
    from ...router.factory import endpoint_of
    from ...router.settings_sources import load_config
    from ...router.tiers.connection import open_client

    config = RouterConfig(cloud_url=url, cloud_api_key=key, cloud_model="unasked", cloud_timeout_s=10.0)
    with suppress(UpdraftError):  # `check_settings` reports this error
        own = load_config()
        if own.cloud_url == config.cloud_url:
            config = replace(own, cloud_api_key=key, cloud_timeout_s=10.0)
    endpoint = endpoint_of(config, str(config.cloud_url))

    async def ask() -> httpx.Response:
        async with open_client(endpoint) as client:
            return await client.get(f"{endpoint.url}/models", params=dict(endpoint.query))

    shown = shown_url(url)
    if not endpoint.provider.capabilities.lists_models:
        return Check("cloud", "ok", f"{shown}: the API {endpoint.provider.name} has no list of models to check")
    started = time.monotonic()
    try:
        reply = asyncio.run(ask())
    except (httpx.HTTPError, UpdraftError) as error:
        return Check("cloud", "fail", f"{shown}: {error}", "check the address (it usually ends in /v1) and the network")
    if reply.status_code in (401, 403):
        fix = "name the key's variable with --api-key-env NAME, or run updraft init"
        return Check("cloud", "fail", f"{shown} refuses the API key", fix)
    fix = "check that the address ends in /v1"
    if reply.status_code != 200:
        return Check("cloud", "fail", f"{shown}/models answers {reply.status_code}", fix)
    try:
        models = msgspec.json.decode(reply.content, type=_Models).data
    except msgspec.DecodeError:
        return Check("cloud", "fail", f"{shown} is not OpenAI-compatible", fix)
    names, took_ms = ", ".join(model.id for model in models[:5]), (time.monotonic() - started) * 1000
    return Check("cloud", "ok", f"{shown}: {names} in {took_ms:.0f} ms")


def _reported(name: str, look: Callable[[], str], fix: str) -> Check:
    try:
        return Check(name, "ok", look())
    except MissingDependencyError as error:
        return Check(name, "warn", error.message, fix)
    except UpdraftError as error:
        return Check(name, "fail", error.message, fix)
    except (ImportError, OSError, ValueError) as error:
        return Check(name, "fail", f"{type(error).__name__}: {error}", fix)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
