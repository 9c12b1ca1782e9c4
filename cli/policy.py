"""`updraft policy list|show|verify|rm`: manages calibrated policies, and checks that they match the local models."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..protocol.errors import ConfigurationError, NotFoundError, UpdraftError
from ..protocol.safety.redaction import printable
from .doctor.findings import Check
from .shared import json_output, options, output
from .shared.command_line import CommandLine

if TYPE_CHECKING:
    from ..classifier.policy.policy import Policy
    from ..model_files.identity import ModelIdentity
    from ..router.config import RouterConfig

app = CommandLine(help="Manage the calibrated policies on this machine.")

_FRESH = "updraft calibrate makes a new policy"
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", show_default=False, help="Policies. [all]")]
Name = Annotated[str, typer.Argument(help="Name of a policy, or path of its folder.", show_default=False)]


@app.command("list")
def list_policies(as_json: json_output.Flag = False) -> None:
    """List the policies in the state folder: pair, rows, promise, date, and whether they match the local models."""
    config = options.Pair().config()
    policies = [_Policy(folder, config) for folder in folders()]
    if as_json:
        json_output.show([policy.facts() for policy in policies])
    elif not policies:
        output.echo("There are no policies yet: create one with updraft calibrate.", err=True)
    else:
        _show_table(policies)


@app.command()
def show(name: Name, local: options.Local = None, as_json: json_output.Flag = False) -> None:
    """Describe a policy: its promise, its calibration data, and whether it is valid for the local models.

    \b
    Example
      updraft policy show model--big
    """
    policy = _Policy(_folder(name), options.Pair(local).config())
    if as_json:
        return json_output.show(policy.facts(whole=True))
    for line in (*policy.words(), *(f"{check.status}  {check.finding}" for check in policy.checks())):
        output.echo(line)
    return None


@app.command()
def verify(names: Names = None, local: options.Local = None, as_json: json_output.Flag = False) -> None:
    """Check the files and versions of policies, and whether the local model is the one that was calibrated.

    Reads the whole model file: its hash, quantisation and chat template must match the calibration.
    Exit code 1 if any check fails.

    \b
    Examples
      updraft policy verify
      updraft policy verify model--big --local model.gguf
    """
    config = options.Pair(local).config()
    chosen = [_folder(name) for name in names] if names else folders()
    results = {folder: _Policy(folder, config).checks(whole=True) for folder in chosen}
    if as_json:
        json_output.show(
            [{"name": folder.name, "checks": list(map(_as_json, checks))} for folder, checks in results.items()]
        )
    elif not results:
        output.echo("There are no policies to verify: create one with updraft calibrate.", err=True)
    else:
        for folder, checks in results.items():
            for check in checks:
                output.echo(f"{check.status:4}  {folder.name}: {check.finding}{f'  {check.fix}.' if check.fix else ''}")
    if any(check.status == "fail" for checks in results.values() for check in checks):
        raise typer.Exit(1)


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Policies to delete.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Delete policies from the state folder, after confirmation. Recalibrate to set a target for the pair again."""
    by_name = {folder.name: folder for folder in folders()}
    if unknown := [name for name in names if name not in by_name]:
        raise _unknown(unknown[0])
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError("There is no terminal to confirm on: add --yes.")
        typer.confirm(printable(f"Delete {', '.join(names)}?"), abort=True, err=True)
    for name in dict.fromkeys(names):
        folder = by_name[name]
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
        output.echo(f"Deleted {name}.", err=True)
    if as_json:
        json_output.show(list(dict.fromkeys(names)))


def folders() -> list[Path]:
    """Return the policy folders in the state folder."""
    from ..classifier.policy.folders import policies_folder
    from ..classifier.policy.graph_files import CARD_NAME

    try:
        return sorted(path.parent for path in policies_folder().glob(f"*/{CARD_NAME}"))
    except PermissionError:  # the folder belongs to another user
        return []


def check_policies(config: RouterConfig) -> list[Check]:
    """Return the problems of the policies on this machine, without hashing model files."""
    results = [(folder.name, _Policy(folder, config).checks()) for folder in folders()]
    return [Check("policies", check.status, f"{name}: {check.finding}", check.fix)
            for name, checks in results for check in checks if check.status != "ok"]  # fmt: skip


def _folder(name: str) -> Path:
    from ..classifier.policy.folders import named_folder
    from ..classifier.policy.graph_files import CARD_NAME

    if not ((folder := named_folder(name)) / CARD_NAME).is_file():
        raise _unknown(name)
    return folder


def _unknown(name: str) -> NotFoundError:
    names = ", ".join(folder.name for folder in folders()) or "none"
    return NotFoundError(f"There is no policy {name!r}. Known: {names}.")


def _as_json(check: Check) -> dict[str, str]:
    finding = check.finding  # `found` is its former name
    return {"check": check.name, "status": check.status, "finding": finding, "found": finding, "fix": check.fix}


@dataclass
class _Policy:
    """A policy folder, checked against the settings of this machine."""

    folder: Path
    config: RouterConfig

    @cached_property
    def loaded(self) -> Policy | UpdraftError:
        """The policy, or the error that prevents its use."""
        from ..classifier.policy.policy import Policy

        try:
            policy = Policy.load(self.folder)
        except UpdraftError as error:
            return error
        return policy if isinstance(policy, Policy) else ConfigurationError(f"{self.folder} is not a pair's policy.")

    def checks(self, *, whole: bool = False) -> list[Check]:
        """Check files and local model. `whole`: also hash the model file, or ask the local server."""
        if isinstance(self.loaded, UpdraftError):
            return [Check("files", "fail", self.loaded.message, _FRESH)]
        return [Check("files", "ok", "files are intact, and graphs load"), *self._model_checks(self.loaded, whole)]

    def facts(self, *, whole: bool = False) -> dict[str, Any]:
        import msgspec

        facts: dict[str, Any] = {"name": self.folder.name, "folder": str(self.folder)}
        checks = {"checks": list(map(_as_json, self.checks()))}
        if isinstance(self.loaded, UpdraftError):
            return facts | checks
        card = self.loaded.card
        facts |= {"models": card.models, "rows": card.rows, "date": card.date, "promise": self._promise(self.loaded)}
        return facts | ({"card": msgspec.to_builtins(card)} if whole else {}) | checks

    def words(self) -> list[str]:
        if isinstance(self.loaded, UpdraftError):
            return []
        from ..classifier.policy.summary import sentences

        card = self.loaded.card
        local = card.local_model
        form = "" if local is None else f" as {local.quantization}{f', run by {local.engine}' if local.engine else ''}"
        sources = ", ".join(f"{source.name} ({source.rows} rows)" for source in card.data)
        scope = card.calibrated_on
        turns = "single questions" if scope.turns == 1 else f"conversations of up to {scope.turns} turns"
        return [
            f"{card.models['local']}{form}, with {card.models['cloud']}. Made on {card.date or 'an unknown date'}.",
            f"Calibrated on {sources or 'unnamed data'}: {turns}, in {' and '.join(scope.scripts) or 'no'} script.",
            *sentences(self.loaded, self.config.target),
        ]

    def row(self) -> tuple[str, ...]:
        """Return the cells of the policy's row in the table."""
        worst = next((check for status in ("fail", "warn") for check in self.checks() if check.status == status), None)
        fits = "yes" if worst is None else worst.finding
        if isinstance(self.loaded, UpdraftError):
            return self.folder.name, "-", "-", "-", "-", fits
        card = self.loaded.card
        pair = f"{card.models['local']} with {card.models['cloud']}"
        return self.folder.name, pair, str(card.rows), self._promise(self.loaded), card.date or "-", fits

    def _promise(self, policy: Policy) -> str:
        point = policy.operating_point(self.config.target)
        sure = "on average" if self.config.target.promise == "mean" else f"promise level {1 - point.delta:.0%}"
        return f"{self.config.target}: {point.cloud_share:.0%} to the cloud, {sure}"

    def _model_checks(self, policy: Policy, whole: bool) -> list[Check]:
        from ..local_engine.model_identity import engine_version
        from ..model_files.identity import file_sha256
        from ..router.factory import local_identity
        from ..router.gates.gates import other_weights

        identity, name = policy.local_model, policy.card.models["local"]
        if identity is None:
            return [Check("model", "warn", f"the policy does not record the model file of {name}", _FRESH)]
        if (served := self._served_check(policy.card.models, identity, whole)) is not None:
            return [served]
        if (file := self._model_file(name)) is None:
            fix = "name the model's file or server with --local"
            return [Check("model", "warn", f"there is no local model {name} to compare with", fix)]
        try:
            here = local_identity(self.config_of(file))
            if difference := identity.difference(here):
                raise other_weights(self.folder, policy.card.models, difference)
            if whole and identity.sha256 and file_sha256(file) != identity.sha256:
                return [Check("model", "fail", f"{file} has another SHA-256 than the calibrated file", _FRESH)]
        except (UpdraftError, OSError) as error:
            return [Check("model", "fail", str(error), "")]
        same = Check("model", "ok", f"{file.name} is the calibrated model, as {here.quantization}")
        if identity.engine in ("", engine_version()):
            return [same]
        text = f"calibrated with {identity.engine}, but {engine_version() or 'no engine'} is installed"
        return [same, Check("engine", "warn", text, "answers may differ slightly: run updraft calibrate again")]

    def _served_check(self, models: dict[str, str], identity: ModelIdentity, whole: bool) -> Check | None:
        """Check that the local server runs the policy's model. `whole`: also send a request to the server.

        Returns None if no local server is configured, or if it serves a model of another name.
        """
        from ..model_files.identity import SERVED
        from ..router.factory import local_server, served_model
        from ..router.gates.gates import other_weights

        if local_server(self.config) is None:
            return None
        if not whole:
            asks = Check("model", "warn", f"{self.config.local} was not asked: run updraft policy verify", "")
            return asks if identity.quantization.startswith(SERVED) else None
        try:
            here = served_model(self.config)
            if here is None or here.name != models["local"]:
                return None
            if difference := identity.difference(here.identity):
                raise other_weights(self.folder, models, difference)
        except UpdraftError as error:
            return Check("model", "fail", str(error), "")
        return Check("model", "ok", f"{self.config.local} serves the calibrated model")

    def config_of(self, file: Path) -> RouterConfig:
        from dataclasses import replace

        from ..router.factory import has_model_file, model_file

        own = has_model_file(self.config) and model_file(self.config) == file
        return self.config if own else replace(self.config, local=str(file), chat_template=None)

    def _model_file(self, name: str) -> Path | None:
        """Return the file of the configured, pulled or packaged model of this name; None if there is no such model."""
        from ..local_engine.store.library import model_path
        from ..router.factory import has_model_file, model_file

        if has_model_file(self.config) and (file := model_file(self.config)).stem == name and file.is_file():
            return file
        from ..embedded.pocket import pocket_small_gguf

        packaged = pocket_small_gguf()
        path = packaged if packaged.stem == name else model_path(name)
        return path if path.is_file() else None


def _show_table(policies: list[_Policy]) -> None:
    from rich.markup import escape

    from .shared.console import Console
    from .shared.tables import columns

    table = columns("name", "pair", "rows", "promise", "date", "fits", right=("rows",), fold=True)
    for policy in policies:
        table.add_row(*map(escape, policy.row()))
    Console(highlight=False).print(table)
