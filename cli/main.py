"""The `updraft` command: registers all subcommands and reports every failure in one line.

These imports only declare options. Commands import their dependencies when they run, so `updraft --help` is fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .. import __version__
from . import bench, cloud, demo, evaluate, init, keys, learn, plan, policy, route, servers, tasks, top, tune
from .calibrate import command as calibrate
from .doctor import command as doctor
from .ledger import requests, usage
from .models import store
from .service import command as service
from .shared import json_output, output
from .shared.command_line import CommandLine
from .shared.failures import exit_code, message_of
from .talk import ask, chat

app = CommandLine(
    name="updraft",
    help="""Answers on the device when the small model is good enough, and in the cloud when it is not.

    An Updraft node gets the local answer as a draft, which the large model verifies.
    The package includes a pair of tiny models, so everything below works without a download.

    First steps

    \b
      updraft demo                 watch both tiers share real work, measured
      updraft init                 choose a local model and a cloud, and save them as settings
      updraft ask --local pocket "What is 17 + 25?"
      updraft chat                 talk, and see which tier answered and why
      updraft serve                an OpenAI-compatible server for any app
      updraft doctor               check the installation, and get a fix for each problem

    Settings come from a TOML file, the environment (UPDRAFT_*) and options; options win.
    UPDRAFT_DEBUG=1 shows tracebacks.""",
)


def _print_version(requested: bool) -> None:
    if requested:
        output.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def version(as_json: json_output.Flag = False) -> None:
    """Print the version."""
    json_output.tell({"version": __version__}, __version__, as_json=as_json)


app.command()(demo.demo)
app.command()(init.init)
app.command()(chat.chat)
app.command()(ask.ask)
app.command()(requests.why)
app.command()(requests.log)
app.command()(usage.usage)
app.command()(servers.serve)
app.command()(servers.node)
app.command()(servers.gateway)
app.command()(plan.plan)
app.command()(top.top)
app.command("eval")(evaluate.evaluate)
app.command()(store.pull)
app.command()(store.models)
app.command()(store.rm)
app.command()(store.verify)
app.command()(calibrate.calibrate)
app.command()(route.route)
app.command()(learn.learn)
app.command()(learn.feedback)
app.command()(tune.tune)
app.command()(doctor.doctor)
app.add_typer(cloud.app, name="cloud")
app.add_typer(service.app, name="service")
app.add_typer(keys.app, name="keys")
app.add_typer(policy.app, name="policy")
app.add_typer(tasks.app, name="tasks")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 failure, 2 wrong usage or settings, 130 interrupted."""
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):  # writing to a closed stdout must fail
        if getattr(sys, name) is None:  # the caller closed it; occupy its number, so that no other file gets it
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open until the process ends
    # Drop empty and relative entries, because they would let programs in the working folder replace system tools.
    programs = filter(os.path.isabs, os.environ.get("PATH", "").split(os.pathsep))
    os.environ["PATH"] = os.pathsep.join(programs) or os.defpath  # an empty PATH also means the working folder
    if os.environ.get("UPDRAFT_DEBUG"):
        app(prog_name="updraft")
    try:
        app(prog_name="updraft")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the outermost frame: users get one line, not a traceback
        output.secho("error: ", fg=typer.colors.RED, err=True, nl=False)
        output.echo(message_of(error), err=True)
        sys.exit(exit_code(error))
