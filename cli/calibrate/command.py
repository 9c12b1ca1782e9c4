"""`updraft calibrate`: makes a routing policy for a pair of models from the user's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import ConfigurationError, UpdraftError
from ..shared import json_output, options, output
from ..shared.help_panels import shows
from ..shared.option_groups import OmittedFields

if TYPE_CHECKING:
    from ...classifier.policy.policy import Policy
    from ...router.config import RouterConfig
    from .sources import CalibrationRun


@shows(
    *options.USUAL,
    *("--data", "--live", "--prompts", "--from-log", "--judge", "--judge-url", "--judge-api-key-env"),
    *("--judge-api-key-file", "--budget", "--weak", "--strong", "--out", "--save", "--plot", "--json"),
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
        int | None, typer.Option(min=1, metavar="N", help="Ask both tiers the first N prompts; grade the answers.")
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
            metavar="MODEL", help="Model that compares free-text answers. [none: embeddings, or else shared words]"
        ),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint of --judge. [the cloud's]")
    ] = None,
    judge_api_key_env: Annotated[str | None, options.key_env("the judge's API key", "--judge-api-key-env")] = None,
    judge_api_key_file: Annotated[Path | None, options.key_file("the judge's API key", "--judge-api-key-file")] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0, metavar="USD", help="Maximum cost of requests to cloud and judge, in US dollars."),
    ] = None,
    weak: Annotated[str | None, typer.Option(help="Column of --data with the local model's score. [weak]")] = None,
    strong: Annotated[str | None, typer.Option(help="Column of --data with the cloud model's score. [strong]")] = None,
    pair: Annotated[options.Pair, OmittedFields(*options.CALIBRATED)],
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
    (--from-log). With --live, both replies are compared with the "answer" of the prompt. Without "answer", the
    cloud's reply counts as right, and the local reply counts as right if both agree; --judge compares longer replies.
    Budgets and privacy rules apply. Run the same command again to resume an interrupted calibration.

    Needs at least 100 prompts; a promise of quality 0.95 needs at least 130, the default of 0.98 at least 300, and a
    third more if the cloud errs. Needs pip install '.[calibrate]' in a clone of Updraft.

    \b
    Examples
      updraft calibrate --data graded.csv --local model.gguf --cloud-model big --quality 0.97
      updraft calibrate --live 500 --prompts mine.txt --local model.gguf --cloud-url https://host/v1 --cloud-model big
      updraft calibrate --live 400 --prompts mine.jsonl --judge bigger --budget 2 --plot curve.png
    """
    from ...classifier.optional_imports import check_fitting
    from ..shared.plots import check_plotting
    from . import sources

    _check_flags(data, live, prompts, from_log, save)
    if judge is None and (judge_url or judge_api_key_env or judge_api_key_file):
        raise ConfigurationError("--judge-url, --judge-api-key-env and --judge-api-key-file need --judge MODEL.")
    if judge is not None and data is not None:
        raise ConfigurationError("--judge cannot be used with --data: the rows of --data are graded already.")
    if plot is not None and plot.suffix != ".png":
        raise ConfigurationError("--plot writes PNG: give it a file name that ends in .png.")
    if plot is not None:
        check_plotting()
    check_fitting()
    config = pair.config()
    if config.local is None:
        raise ConfigurationError("No local model is configured: name one with --local.", param="local")
    key = options.given_key(judge_api_key_env, judge_api_key_file, "--judge-api-key")
    judging = sources.JudgeOptions(judge, judge_url, key, budget)
    if data is not None:
        run = sources.from_file(data, weak, strong, config)
    elif live is not None and prompts is not None:
        run = sources.ask_tiers(config, prompts, live, judging)
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
    sources = [
        name for name, value in (("--data", data), ("--live", live), ("--from-log", from_log)) if value is not None
    ]
    if len(sources) > 1:
        raise ConfigurationError(f"{' and '.join(sources)} are mutually exclusive: give one of them.")
    if not sources:
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
    from ...protocol.settings import config_file
    from ...router.factory import hashed_identity

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
    err = json_output.is_stdout(json_path)
    for line in (*_shown(policy, config, plot), *run.notes):
        output.echo(line, err=err)
    how = "the router loads the policy" if out is None else f"to use it, set policy = {str(folder)!r}"
    output.echo(f"The policy for {run.models['local']} with {run.models['cloud']} is in {folder}: {how}.", err=err)
    name, value = config.target.name, f"{config.target.value:g}"
    option = f"--{name.replace('_', '-')} {value}"
    where = f"{option}, {name}={value} in code, or {name} = {value} in {config_file()}"
    output.echo(f"To set this target: {where}.", err=err)
    if json_path is not None:
        from ...bench.shared.report import Report

        report = Report.of({"calibrate": run.source.name, **run.models}, figures(policy, config.target))
        json_output.write(json_path, report.fields())


def _shown(policy: Policy, config: RouterConfig, picture: Path | None) -> list[str]:
    """Return the curve, the promise and the data as lines; also write the curve to `picture` if it is given."""
    from ...bench.router.plot import terminal_plot
    from ...classifier.evaluation import cost_quality as curve
    from ...classifier.policy.summary import sentences

    rows = policy.calibration
    routed = curve.fine_curve(rows.judged, rows.local, rows.cloud)
    oracle = curve.fine_curve(curve.oracle_scores(rows.local, rows.cloud), rows.local, rows.cloud)
    lines = [terminal_plot(routed, oracle), *sentences(policy, config.target)]
    if picture is not None:
        from ..shared.plots import curve_png

        point = policy.operating_point(config.target)
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(curve_png(routed, oracle, (point.cloud_share, point.quality * routed.strong)))
        lines.append(f"The curve is in {picture}.")
    return lines
