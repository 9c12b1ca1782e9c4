"""`updraft service install|status|logs|uninstall`: runs the router as a background service that starts at login."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import ConfigurationError
from ..shared import json_output, output
from ..shared.command_line import CommandLine
from ..shared.options import SERVE_PORT

if TYPE_CHECKING:
    from .units import ServiceSpec

app = CommandLine(help="Run the router as a background service that starts at login.")

_START_S = 60.0
_POLL_S = 0.2

Port = Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1; other machines cannot reach it.")]


@app.command()
def install(
    port: Port = SERVE_PORT,
    pull: Annotated[
        str | None, typer.Option("--pull", metavar="MODEL", help="Model to download first and set as the local model.")
    ] = None,
    as_json: json_output.Flag = False,
) -> None:
    """Start `updraft serve` now and at every login, with the settings file.

    If there are no settings yet, name a model with --pull, or run updraft init first.

    \b
    Examples
      updraft service install --pull smollm2
      updraft service status
    """
    from ...protocol.http.server import bind_socket
    from ...router.factory import check_startable
    from ...router.settings_sources import load_config
    from .managers import service_manager

    manager = service_manager()
    if pull is not None:
        _pull(pull)
    check_startable(load_config())
    running = manager.definition.is_file() and manager.status() == "active"
    if not running:
        bind_socket("127.0.0.1", port).close()  # report a busy port here, not in the log
    spec = service_spec(port)
    ready = _ready_file()
    ready.unlink(missing_ok=True)
    manager.install(spec)
    url = _wait(spec.output)
    if as_json:
        json_output.show({"url": url, "definition": str(manager.definition)})
        return
    output.echo(f"Updraft runs in the background: {url}")
    output.echo(f"Service definition: {manager.definition}. The service reloads the settings file when it changes.")


@app.command()
def status(as_json: json_output.Flag = False) -> None:
    """Show whether the service is installed and answers. Exit code 1 if it does not answer."""
    from .managers import service_manager

    manager = service_manager()
    installed = manager.definition.is_file()
    url = _address()
    facts = {
        "installed": installed,
        "state": manager.status() if installed else "not installed",
        "url": url,
        "healthy": url is not None and _healthy(url),
    }
    health = "answers" if facts["healthy"] else "does not answer"
    json_output.tell(facts, f"{facts['state']}; {url} {health}" if url else facts["state"], as_json=as_json)
    if not facts["healthy"]:
        raise typer.Exit(1)


@app.command()
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100_000, help="Number of lines.")] = 50,
    as_json: json_output.Flag = False,
) -> None:
    """Print the last lines of the service's log."""
    last = deque[str]((), lines)
    for path in (_output_file(), log_file()):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as text:
                last.extend(line.rstrip("\n") for line in text)
    if as_json:
        json_output.show(list(last))
        return
    for line in last:
        output.echo(line)
    if not last:
        output.echo(f"There is no log {log_file()} yet.", err=True)


@app.command()
def uninstall(as_json: json_output.Flag = False) -> None:
    """Stop and remove the service. Settings, models and ledger stay."""
    from .managers import service_manager

    manager = service_manager()
    if not manager.definition.is_file():
        raise ConfigurationError("No service is installed, so there is nothing to remove.")
    manager.uninstall()
    _ready_file().unlink(missing_ok=True)
    json_output.tell({"removed": str(manager.definition)}, "The service is removed.", as_json=as_json)


def service_spec(port: int) -> ServiceSpec:
    """Return the service for this installation, with the current paths of settings, state and models."""
    from .units import ServiceSpec

    # "-P" keeps the service from importing modules of its working folder.
    command = (sys.executable, "-P", "-m", "updraft", "serve", "--port", str(port))
    files = ("--log-file", str(log_file()), "--ready-file", str(_ready_file()))
    names = ("UPDRAFT_HOME", "UPDRAFT_CONFIG", "UPDRAFT_MODELS", "PYTHONPATH")
    environment = {name: os.environ[name] for name in names if os.environ.get(name)}
    return ServiceSpec((*command, *files), environment, _output_file())


def log_file() -> Path:
    """Return the path of the service's log file."""
    from ...protocol.settings import state_folder

    return state_folder() / "serve.log"


def _output_file() -> Path:
    return log_file().with_name("service.out")


def _ready_file() -> Path:
    return log_file().with_name("serve.url")


def _pull(model: str) -> None:
    """Download the model and set it as `local`. Raises ConfigurationError if the settings name another local model."""
    from ...local_engine.store.library import Library
    from ...protocol.safety.private_files import write_private
    from ...protocol.settings import config_file, read_toml
    from ..models.store import obtain

    name = obtain(Library(), model, yes=True).name
    path = config_file()
    set_there = read_toml(path).get("local")
    if set_there is None:
        settings = path.read_text(encoding="utf-8") if path.exists() else ""
        write_private(path, f"local = {json.dumps(name)}\n{settings}")  # JSON strings are valid TOML strings
    elif set_there != name:
        raise ConfigurationError(f'{path} names another local model, {set_there!r}. Set local = "{name}" there.')


def _address() -> str | None:
    try:
        return _ready_file().read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def _healthy(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _wait(printed: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if (url := _address()) is not None:
            return url
        time.sleep(_POLL_S)
    raise ConfigurationError(
        f"The service was installed but did not start within {_START_S:.0f} s. See `updraft service logs` and "
        f"{printed}."
    )
