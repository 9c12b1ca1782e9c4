"""`updraft calibrate`: a routing policy for your own pair of models, from your own prompts."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..protocol.errors import ConfigurationError, InvalidRequestError, UpstreamError
from .shared import json_output, options, output

if TYPE_CHECKING:
    from ..classifier.graded_row import GradedRow
    from ..classifier.policy.policy import Policy
    from ..classifier.training.train import FitRecipe
    from ..router.config import RouterConfig


def calibrate(
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Graded prompts: .csv or .jsonl, also .gz (docs/guides/calibrate.md says how).",
        ),
    ] = None,
    live: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ask both tiers the first N of --prompts and grade them.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='For --live: .txt, a prompt a line, or .jsonl of {"prompt", "answer"?, "match"?}.',
        ),
    ] = None,
    weak: Annotated[str | None, typer.Option(help="Column of --data with the local model's score. [weak]")] = None,
    strong: Annotated[str | None, typer.Option(help="Column with the cloud model's score. [strong]")] = None,
    local: options.Local = None,
    cloud: options.Cloud = None,
    cloud_model: options.CloudModel = None,
    cloud_key_env: options.CloudKeyEnv = None,
    quality: options.Quality = None,
    cloud_share: options.CloudShare = None,
    cost: options.Cost = None,
    promise: options.Promise = None,
    confidence: options.Confidence = 0.9,
    out: options.PolicyFolder = None,
    save: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also keep the graded prompts of --live, text and all (.jsonl).")
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Learn which prompts your local model can keep, and what a target costs.

    Give graded prompts (--data), or let both tiers answer yours (--live). With --live, a line's "answer" is what both
    replies are compared with. Without one the cloud's reply counts as right, and the local one if it
    agrees. "Quality" then means agreement with the cloud. Budgets hold, and private prompts are left out.

    At least 100 prompts. With more, less has to escalate for the same promise. Takes
    pip install '.[train]' in a clone of Updraft.

    \b
    Examples
      updraft calibrate --data graded.csv --local model.gguf --cloud-model big --quality 0.97
      updraft calibrate --live 500 --prompts mine.txt --local model.gguf --cloud https://host/v1 --cloud-model big
      updraft calibrate --live 400 --prompts mine.jsonl --cloud-share 0.3
    """
    if (live is None) != (prompts is None):
        raise ConfigurationError("--live N and --prompts FILE belong together.")
    if live is not None and data is not None:
        raise ConfigurationError("--data and --live exclude each other.")
    if live is None and save is not None:
        raise ConfigurationError("--save keeps what --live graded; --data is a file already.")
    config = options.Pair(local, cloud, cloud_model, cloud_key_env, quality, cloud_share, cost, promise).config()
    if config.local is None:
        raise ConfigurationError("There is no local model to calibrate: name one with --local.", param="local")
    if prompts is not None and live is not None:
        task = _from_life(config, prompts, live, save)
    elif data is not None:
        task = _from_file(data, weak, strong, config)
    else:
        raise ConfigurationError("Give --data FILE or --live N.")
    try:
        _fit(task, config, 1 - confidence, out, json_path)
    except Exception:
        if live is not None and save is None and task.rows:
            _rescue(task.rows)
        raise


@dataclass(frozen=True, slots=True)
class _Task:
    """Graded rows and where they come from."""

    rows: list[GradedRow]
    models: dict[str, str]
    source: Path
    grading: str


def _from_file(data: Path, weak: str | None, strong: str | None, config: RouterConfig) -> _Task:
    from ..classifier.grading.graded_data import Columns, read_graded

    rows = read_graded(data, Columns(weak, strong))
    return _Task(
        rows, {"local": _model_id(config), "cloud": options.cloud_model_of(config)}, data, "the scores of the file"
    )


def _from_life(config: RouterConfig, prompts: Path, n: int, save: Path | None) -> _Task:
    import asyncio

    from ..bench.both_tiers import ask_both, grading_of
    from ..bench.questions import read_prompts
    from ..classifier.training.router_model import MIN_LABELS
    from ..classifier.training.train import check_installed
    from ..router.factory import open_local
    from ..router.privacy.rules import PrivacyRules
    from .shared.console import Console
    from .shared.watch import Watch

    found = read_prompts(prompts)
    if len(found) < n:
        raise InvalidRequestError(f"{prompts} holds {len(found)} prompts, --live asks for {n}.", param="live")
    _check_allowed(config)
    watch = Watch(Console(stderr=True))
    rules = PrivacyRules(config.privacy)
    asked = [prompt for prompt in found[:n] if rules.search(prompt.prompt) is None]
    if len(asked) < n:
        watch.say(f"{n - len(asked)} of {n} prompts are kept on this device by a privacy rule, and not asked.")
    if len(asked) < MIN_LABELS:  # what can be known to fail must not be paid for first
        raise InvalidRequestError(
            f"A policy needs at least {MIN_LABELS} graded prompts, not {len(asked)}.", param="live"
        )
    check_installed()
    with options.with_cloud(config, watch.say) as running:
        if running.cloud_url is None:
            raise ConfigurationError("There is no cloud to compare with: name one with --cloud.", param="cloud_url")
        with open_local(running) as engine, watch.stage("both tiers", len(asked)) as advance:
            live = asyncio.run(ask_both(running, engine, asked, lambda: advance("")))
            models = {"local": engine.model_id, "cloud": running.cloud_model}
    shown = "; ".join(live.failures[:3])
    if not live.rows:
        raise UpstreamError(f"No prompt was answered by both tiers: {shown}")
    if live.failures:
        watch.say(f"{len(live.failures)} of {len(asked)} prompts got no row, the policy is from the others: {shown}")
    if save is not None:
        from ..classifier.grading.graded_data import write_graded

        write_graded(save, live.rows)
    return _Task(live.rows, models, prompts, grading_of(asked))


def _check_allowed(config: RouterConfig) -> None:
    """Whether the settings let every prompt go to the cloud. Raises ConfigurationError."""
    if config.offline:
        raise ConfigurationError("--live asks the cloud, which offline forbids: set it to false.", param="offline")
    limits = (config.budget, config.budget_per_key, config.budget_per_user)
    if any(each.cloud_share is not None and each.cloud_share < 1 for each in limits):
        raise ConfigurationError(
            "--live asks the cloud every time, which cloud_share of a budget forbids: set it to 1 meanwhile.",
            param="budget.cloud_share",
        )


def _rescue(rows: list[GradedRow]) -> None:
    """Keep what was paid for, and say where."""
    from ..classifier.grading.graded_data import write_graded
    from ..protocol.settings import state_folder

    path = state_folder() / "graded.jsonl"
    write_graded(path, rows)
    output.echo(f"The graded prompts are in {path}: --data {path} goes on from there.", err=True)


def _fit(task: _Task, config: RouterConfig, delta: float, out: Path | None, json_path: Path | None) -> None:
    from ..classifier.policy.folders import policy_folder_of
    from ..classifier.policy.graph_files import sha256
    from ..classifier.policy.policy import Source
    from ..classifier.training.train import FitRecipe, fit_policy

    recipe = FitRecipe(
        models=task.models,
        data=[Source(task.source.name, sha256(task.source.read_bytes()), len(task.rows))],
        grading=task.grading,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        delta=delta,
    )
    folder = out or policy_folder_of(task.models)
    policy = fit_policy(task.rows, recipe, folder)
    apart = json_output.is_stdout(json_path)
    _show(policy, config, apart)
    for line in (_where(folder, recipe, given=out is not None), _next(config)):
        output.echo(line, err=apart)
    if json_path is not None:
        from ..bench.report import Report

        report = Report.of({"calibrate": task.source.name, **task.models}, _figures(policy, config))
        json_output.write(json_path, report.fields())


def _figures(policy: Policy, config: RouterConfig) -> dict[str, Any]:
    from ..classifier.policy.summary import figures

    return figures(policy, config.target)


def _show(policy: Policy, config: RouterConfig, apart: bool) -> None:
    from ..bench.router_report import terminal_plot
    from ..classifier.evaluation import cost_quality as curve
    from ..classifier.policy.summary import sentences

    rows = policy.calibration
    routed = curve.fine_curve(rows.judged, rows.local, rows.cloud)
    oracle = curve.fine_curve(curve.oracle_scores(rows.local, rows.cloud), rows.local, rows.cloud)
    for line in (terminal_plot(routed, oracle), *sentences(policy, config.target)):
        output.echo(line, err=apart)


def _where(folder: Path, recipe: FitRecipe, *, given: bool) -> str:
    pair = f"{recipe.models['local']} with {recipe.models['cloud']}"
    how = f"set policy = {str(folder)!r}" if given else "the router takes it by itself"
    return f"Policy for {pair} in {folder}: {how}."


def _next(config: RouterConfig) -> str:
    from ..protocol.settings import config_file

    name, value = config.target.name, f"{config.target.value:g}"
    option = f"--{name.replace('_', '-')} {value}"
    return f"To use it: {option}, {name}={value} in code, or {name} = {value} in {config_file()}."


def _model_id(config: RouterConfig) -> str:
    """The name under which the router will run the local model."""
    from ..router.factory import model_file

    return model_file(config).stem
