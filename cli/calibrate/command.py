"""`updraft calibrate`: makes a routing policy for a pair of models from the user's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import ConfigurationError, UpdraftError
from ..shared import json_output, options, output
from ..shared.help_panels import shows
from ..shared.option_groups import Without

if TYPE_CHECKING:
    from ...router.config import RouterConfig
    from .sources import CalibrationRun


@shows(
    *options.USUAL,
    *("--data", "--live", "--prompts", "--from-log", "--judge", "--judge-url", "--judge-api-key-env", "--budget"),
    *("--weak", "--strong", "--out", "--save", "--plot", "--json"),
)
def calibrate(
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Graded prompts: .csv or .jsonl, also .gz (format: docs/guides/calibrate.md).",
        ),
    ] = None,
    live: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ask both tiers the first N of --prompts, grade the answers.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='Prompts for --live: .txt, one per line, or .jsonl: {"prompt" or "messages", "answer"?, "match"?}.',
        ),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Requests recorded with experience_text = true: experience.sqlite3 in the state folder.",
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that compares free-text answers. [embeddings if installed, else shared words]",
        ),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint of --judge. [the cloud's]")
    ] = None,
    judge_api_key_env: Annotated[
        str | None, options.key_env("the API key of --judge-url", "--judge-api-key-env")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0, metavar="USD", help="Stop asking cloud and judge before the cost could exceed this."),
    ] = None,
    weak: Annotated[str | None, typer.Option(help="Column of --data with the local model's score. [weak]")] = None,
    strong: Annotated[str | None, typer.Option(help="Column of --data with the cloud model's score. [strong]")] = None,
    pair: Annotated[options.Pair, Without("cloud_provider", *options.CALIBRATED)],
    promise_level: options.PromiseLevel = 0.9,
    out: options.PolicyFolder = None,
    save: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also save the graded prompts with their texts (.jsonl).")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", dir_okay=False, help="Also save the cost-quality curve as a picture."),
    ] = None,
    json_path: json_output.File = None,
) -> None:
    """Learn which prompts your local model can answer itself, and what a target costs.

    Use graded prompts (--data), ask both tiers your prompts (--live), or use requests that the router recorded
    (--from-log). With --live, both replies are compared with the line's "answer". Without "answer" the cloud's reply
    counts as right, and the local reply if it agrees; --judge compares longer replies. Budgets and privacy rules
    apply. Run the same command again to resume an interrupted --live.

    Needs at least 100 prompts; a promise of quality 0.95 needs about 130, the default of 0.98 about 300. Needs
    pip install '.[calibrate]' in a clone of Updraft.

    \b
    Examples
      updraft calibrate --data graded.csv --local model.gguf --cloud-model big --quality 0.97
      updraft calibrate --live 500 --prompts mine.txt --local model.gguf --cloud-url https://host/v1 --cloud-model big
      updraft calibrate --live 400 --prompts mine.jsonl --judge bigger --budget 2 --plot curve.png
    """
    from ...classifier.optional_imports import check_fitting
    from . import sources
    from .plot import check_plotting

    _check_flags(data, live, prompts, from_log, save)
    if judge is None and (judge_url or judge_api_key_env):
        raise ConfigurationError("--judge-url and --judge-api-key-env need --judge MODEL.")
    if judge is not None and data is not None:
        raise ConfigurationError("--judge cannot be used with --data: those rows are graded already.")
    if plot is not None and plot.suffix != ".png":
        raise ConfigurationError("--plot writes PNG: give it a file name that ends in .png.")
    if plot is not None:
        check_plotting()
    check_fitting()
    config = pair.config()
    if config.local is None:
        raise ConfigurationError("No local model is configured: name one with --local.", param="local")
    judging = sources.JudgeOptions(judge, judge_url, judge_api_key_env, budget)
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
        _fit(run, config, promise_level, out, plot, json_path)
        run.done()
    except (UpdraftError, KeyboardInterrupt):
        run.stopped()
        raise


def _check_flags(
    data: Path | None, live: int | None, prompts: Path | None, from_log: Path | None, save: Path | None
) -> None:
    """Raise ConfigurationError unless the options name exactly one source of rows."""
    if (live is None) != (prompts is None):
        raise ConfigurationError("--live N and --prompts FILE go together: give both.")
    given = [
        name for name, value in (("--data", data), ("--live", live), ("--from-log", from_log)) if value is not None
    ]
    if len(given) > 1:
        raise ConfigurationError(f"{' and '.join(given)} are mutually exclusive: give one of them.")
    if not given:
        raise ConfigurationError("Give --data FILE, --live N with --prompts FILE, or --from-log FILE.")
    if data is not None and save is not None:
        raise ConfigurationError("--save needs --live or --from-log: the rows of --data are in a file already.")


def _fit(
    run: CalibrationRun, config: RouterConfig, level: float, out: Path | None, plot: Path | None, json_path: Path | None
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
        promise_level=level,
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
    how = f"set policy = {str(folder)!r} to use it" if given else "the router loads it automatically"
    return f"The policy for {pair} is in {folder}: {how}."


def _next(config: RouterConfig) -> str:
    from ...protocol.settings import config_file

    name, value = config.target.name, f"{config.target.value:g}"
    option = f"--{name.replace('_', '-')} {value}"
    return f"To set this target: {option}, {name}={value} in code, or {name} = {value} in {config_file()}."
