"""`updraft calibrate`: a routing policy for your own pair of models, from your own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import ConfigurationError, UpdraftError
from ..shared import json_output, options, output
from ..shared.option_groups import Without

if TYPE_CHECKING:
    from ...router.config import RouterConfig
    from .sources import CalibrationRun


def calibrate(
    *,
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
            help='For --live: .txt, a prompt a line, or .jsonl of {"prompt" or "messages", "answer"?, "match"?}.',
        ),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="What the router has kept with experience_text = true: experience.sqlite3 in the state folder.",
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that compares answers in free text. Without one: embeddings if installed, else shared words.",
        ),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint of --judge. [that of the cloud]")
    ] = None,
    judge_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable that holds the key of --judge-url.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0, metavar="USD", help="Ask cloud and judge only as long as this is sure to be enough."),
    ] = None,
    weak: Annotated[str | None, typer.Option(help="Column of --data with the local model's score. [weak]")] = None,
    strong: Annotated[str | None, typer.Option(help="Column with the cloud model's score. [strong]")] = None,
    pair: Annotated[options.Pair, Without("cloud_provider", *options.CALIBRATED)],
    confidence: options.Confidence = 0.9,
    out: options.PolicyFolder = None,
    save: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also keep the graded prompts, text and all (.jsonl).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", dir_okay=False, help="Also draw the curve into a picture.")
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Learn which prompts your local model can keep, and what a target costs.

    Give graded prompts (--data), let both tiers answer yours (--live), or take what the router has kept (--from-log).
    With --live, a line's "answer" is what both replies are compared with. Without one the cloud's reply counts as
    right, and the local one if it agrees; a --judge compares longer ones. Budgets hold, and private prompts are left
    out. A --live that was killed goes on where it stopped when it is called again.

    At least 100 prompts. A promise of quality 0.95 takes about 130, the default of 0.98 about 300. Takes
    pip install '.[calibrate]' in a clone of Updraft.

    \b
    Examples
      updraft calibrate --data graded.csv --local model.gguf --cloud-model big --quality 0.97
      updraft calibrate --live 500 --prompts mine.txt --local model.gguf --cloud https://host/v1 --cloud-model big
      updraft calibrate --live 400 --prompts mine.jsonl --judge bigger --budget 2 --plot curve.png
    """
    from ...classifier.optional import check_fitting
    from . import sources
    from .picture import check_plotting

    _check_flags(data, live, prompts, from_log, save)
    if judge is None and (judge_url or judge_key_env):
        raise ConfigurationError("--judge-url and --judge-key-env belong to --judge MODEL.")
    if judge is not None and data is not None:
        raise ConfigurationError("--judge compares answers; the rows of --data have their grades already.")
    if plot is not None and plot.suffix != ".png":
        raise ConfigurationError("--plot draws a picture in PNG: name it FILE.png.")
    if plot is not None:
        check_plotting()
    check_fitting()
    config = pair.config()
    if config.local is None:
        raise ConfigurationError("There is no local model to calibrate: name one with --local.", param="local")
    judging = sources.Judging(judge, judge_url, judge_key_env, budget)
    if data is not None:
        run = sources.from_file(data, weak, strong, config)
    elif live is not None and prompts is not None:
        run = sources.from_life(config, prompts, live, judging)
    else:
        assert from_log is not None
        run = sources.from_log(config, from_log, judging)
    try:
        if save is not None:
            from ...classifier.grading.graded_data import write_graded

            write_graded(save, run.rows)
        _fit(run, config, 1 - confidence, out, plot, json_path)
        run.done()
    except (UpdraftError, KeyboardInterrupt):
        run.stopped()
        raise


def _check_flags(
    data: Path | None, live: int | None, prompts: Path | None, from_log: Path | None, save: Path | None
) -> None:
    """Raises ConfigurationError unless there is one source of rows."""
    if (live is None) != (prompts is None):
        raise ConfigurationError("--live N and --prompts FILE belong together.")
    given = [
        name for name, value in (("--data", data), ("--live", live), ("--from-log", from_log)) if value is not None
    ]
    if len(given) > 1:
        raise ConfigurationError(f"{' and '.join(given)} exclude each other.")
    if not given:
        raise ConfigurationError("Give --data FILE, --live N with --prompts FILE, or --from-log FILE.")
    if data is not None and save is not None:
        raise ConfigurationError("--save keeps what --live or --from-log graded; --data is a file already.")


def _fit(
    run: CalibrationRun, config: RouterConfig, delta: float, out: Path | None, plot: Path | None, json_path: Path | None
) -> None:
    import datetime

    from ...classifier.policy.folders import policy_folder_of
    from ...classifier.policy.summary import figures
    from ...classifier.training.train import FitRecipe, fit_policy
    from ...router.factory import hashed_identity
    from .printing import show

    recipe = FitRecipe(
        models=run.models,
        data=[run.source],
        grading=run.grading,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        delta=delta,
        local_model=hashed_identity(config),
        metrics=run.metrics,
    )
    folder = out or policy_folder_of(run.models)
    policy = fit_policy(run.rows, recipe, folder)
    apart = json_output.is_stdout(json_path)
    for line in (*show(policy, config, plot), *run.notes, _where(folder, run.models, given=out is not None)):
        output.echo(line, err=apart)
    output.echo(_next(config), err=apart)
    if json_path is not None:
        from ...bench.shared.report import Report

        report = Report.of({"calibrate": run.source.name, **run.models}, figures(policy, config.target))
        json_output.write(json_path, report.fields())


def _where(folder: Path, models: dict[str, str], *, given: bool) -> str:
    pair = f"{models['local']} with {models['cloud']}"
    how = f"set policy = {str(folder)!r}" if given else "the router takes it by itself"
    return f"Policy for {pair} in {folder}: {how}."


def _next(config: RouterConfig) -> str:
    from ...protocol.settings import config_file

    name, value = config.target.name, f"{config.target.value:g}"
    option = f"--{name.replace('_', '-')} {value}"
    return f"To use it: {option}, {name}={value} in code, or {name} = {value} in {config_file()}."
