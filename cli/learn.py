"""`updraft learn` and `updraft feedback`: policies refitted on recorded requests and user feedback."""

from __future__ import annotations

import datetime
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..protocol.errors import ConfigurationError, NotFoundError
from ..protocol.safety.private_files import has_file
from .shared import json_output, options, output
from .shared.help_panels import shows
from .shared.option_groups import OmittedFields


@shows(*options.USUAL, "--out", "--json")
def learn(
    pair: Annotated[options.Pair, OmittedFields("cloud_provider", "api_key_env", "api_key_file", *options.CALIBRATED)],
    promise_level: options.PromiseLevel = 0.9,
    out: options.PolicyFolder = None,
    json_path: json_output.File = None,
) -> None:
    """Refit the pair's policy on requests that the router recorded, graded by the cloud's answers and by feedback.

    Escalated requests alone are a biased sample. So set exploration (0.05, for example) or shadow = true in the
    settings for a while: both tiers then answer a random share of the requests.
    Routers load the new policy at their next start. Needs pip install '.[calibrate]' in a clone of Updraft.

    \b
    Examples
      UPDRAFT_EXPLORATION=0.05 updraft serve
      updraft learn
      updraft learn --local model.gguf --cloud-model big --out policies/mine
    """
    from ..classifier.optional_imports import check_fitting

    config = pair.config()
    path = _experience_path(config.experience)
    check_fitting()
    from ..classifier.online.experience import ExperienceStore, readable
    from ..classifier.online.refit import GRADING
    from ..classifier.online.refit import learn as fit
    from ..classifier.policy.folders import policy_folder_of
    from ..classifier.policy.policy import Policy
    from ..classifier.policy.summary import figures, sentences
    from ..classifier.training.train import FitRecipe
    from ..router.factory import hashed_identity, local_name
    from ..router.feedback.collector import pair_name

    models = {"local": local_name(config), "cloud": options.cloud_model_of(config)}
    with closing(ExperienceStore(path)) as experience:
        rows = experience.rows(pair_name(models))
        counts = experience.pairs()
    if not rows:
        known_pairs = ", ".join(f"{pair} ({n})" for pair, n in counts.items()) or "no pair"
        raise ConfigurationError(f"No requests of {pair_name(models)} are recorded. Recorded: {known_pairs}.")
    sound = readable(rows)
    if len(sound) < len(rows):
        output.echo(f"{len(rows) - len(sound)} of {len(rows)} judged answers are damaged and were skipped.", err=True)
    folder = out or policy_folder_of(models)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    recipe = FitRecipe(models, [], GRADING, date, promise_level, local_model=hashed_identity(config))
    with suppress(ConfigurationError):  # there may be no earlier policy to copy `calibrated_on` from
        recipe = replace(recipe, calibrated_on=Policy.load(policy_folder_of(models)).calibrated_on)
    policy = fit(sound, recipe, folder)
    for line in (*sentences(policy, config.target), f"Policy for {pair_name(models)} in {folder}."):
        output.echo(line, err=json_output.is_stdout(json_path))
    if json_path is not None:
        from ..bench.shared.report import Report

        report = Report.of({"learn": pair_name(models)}, figures(policy, config.target))
        json_output.write(json_path, report.fields())


def _experience_path(configured: Path | None) -> Path:
    """Return the path of the experience file. Raises ConfigurationError if it does not exist."""
    from ..classifier.policy.folders import experience_file

    path = configured or experience_file()
    if not has_file(path):
        raise ConfigurationError(
            f"There is no experience file {path}: set experience = 'features', exploration or shadow, and use the "
            "router first."
        )
    return path


def feedback(
    request_id: Annotated[
        str, typer.Argument(help="Value of the answer's updraft.request_id or its x-updraft-request-id header.")
    ],
    thumb: Annotated[Literal["up", "down"], typer.Argument(help="Rating of the answer: up for good, down for bad.")],
    as_json: json_output.Flag = False,
) -> None:
    """Rate an answer. `updraft learn` uses the rating as a label.

    \b
    Example
      updraft feedback chatcmpl-0123456789abcdef down
    """
    from ..router.settings_sources import load_config

    config, up = load_config(), thumb == "up"
    noted = _noted_in_ledger(config.ledger, request_id, up=up)
    learned = _noted_as_experience(config.experience, request_id, up=up)
    if not (noted or learned):
        raise NotFoundError(f"Request {request_id[:100]!r} is not in the ledger or experience file: see updraft log.")
    facts = {"request_id": request_id, "feedback": thumb, "learned": learned}
    json_output.tell(facts, f"Recorded feedback for {request_id}: {thumb}.", as_json=as_json)


def _noted_in_ledger(path: Path | None, request_id: str, *, up: bool) -> bool:
    import asyncio

    from ..router.accounting.ledger import Ledger, collect_rows

    if path is None or not has_file(path):
        return False
    collect_rows(path)
    with closing(Ledger(path)) as ledger:
        return asyncio.run(ledger.feedback(request_id, up=up))


def _noted_as_experience(path: Path | None, request_id: str, *, up: bool) -> bool:
    """Record feedback in the experience file; returns False if the file has no complete local answer of this id."""
    from ..classifier.online.experience import ExperienceStore
    from ..classifier.policy.folders import experience_file

    path = path or experience_file()
    if not has_file(path):
        return False
    with closing(ExperienceStore(path)) as experience:
        return experience.feedback(request_id, up=up)
