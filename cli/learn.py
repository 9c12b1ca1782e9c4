"""`updraft learn` and `updraft feedback`: what use has shown, turned into a better policy."""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

import typer

from ..protocol.errors import ConfigurationError, NotFoundError
from .shared import json_output, options


def learn(
    local: options.Local = None,
    cloud: options.Cloud = None,
    cloud_model: options.CloudModel = None,
    quality: options.Quality = None,
    cloud_share: options.CloudShare = None,
    cost: options.Cost = None,
    promise: options.Promise = None,
    confidence: options.Confidence = 0.9,
    out: options.PolicyFolder = None,
    json_path: json_output.File = None,
) -> None:
    """Fit the pair's policy again on what the router has seen: escalations are labels, and so is feedback.

    Labels of escalations alone are one-sided. So set exploration (say 0.05) in the settings, or
    shadow = true for a while: both tiers then answer a random share of the requests.
    Routers take the new policy when they start. Takes pip install '.[train]' in a clone of Updraft.

    \b
    Examples
      UPDRAFT_EXPLORATION=0.05 updraft serve
      updraft learn
      updraft learn --local model.gguf --cloud-model big --out policies/mine
    """
    config = options.Pair(local, cloud, cloud_model, None, quality, cloud_share, cost, promise).config()
    if config.experience is None or not config.experience.exists():
        raise ConfigurationError(f"There is no experience at {config.experience}: use the router first.")
    from ..classifier.online.experience import Experience, readable
    from ..classifier.online.refit import GRADING
    from ..classifier.online.refit import learn as fit
    from ..classifier.policy.folders import policy_folder_of
    from ..classifier.policy.load import load_policy
    from ..classifier.policy.summary import figures, sentences
    from ..classifier.training.train_text import FitRecipe
    from ..router.factory import model_file
    from ..router.feedback.collector import pair_name

    models = {"local": model_file(config).stem, "cloud": options.cloud_model_of(config)}
    experience = Experience(config.experience)
    try:
        rows = experience.rows(pair_name(models))
        known = experience.pairs()
    finally:
        experience.close()
    if not rows:
        seen = ", ".join(f"{pair} ({n})" for pair, n in known.items()) or "no pair"
        raise ConfigurationError(f"Nothing was seen of {pair_name(models)}. Known: {seen}.")
    sound = readable(rows)
    if len(sound) < len(rows):
        typer.echo(f"{len(rows) - len(sound)} of {len(rows)} judged answers are damaged, and are left out.", err=True)
    folder = out or policy_folder_of(models)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    recipe = FitRecipe(models, [], GRADING, date, 1 - confidence)
    with suppress(ConfigurationError):  # where there is a policy, what it knew was asked; the new one knows the same
        recipe = replace(recipe, calibrated_on=load_policy(policy_folder_of(models)).calibrated_on)
    policy = fit(sound, recipe, folder)
    for line in (*sentences(policy, config.target), f"Policy for {pair_name(models)} in {folder}."):
        typer.echo(line, err=json_output.is_stdout(json_path))
    if json_path is not None:
        from ..bench.report import Report

        report = Report.of({"learn": pair_name(models)}, figures(policy, config.target))
        json_output.write(json_path, report.fields())


def feedback(
    request_id: Annotated[
        str, typer.Argument(help="The answer's updraft.request_id, or its x-updraft-request-id header.")
    ],
    thumb: Annotated[Literal["up", "down"], typer.Argument(help="Was the answer good?")],
    as_json: json_output.Flag = False,
) -> None:
    """Say whether an answer was good. `updraft learn` takes it into account.

    \b
    Example
      updraft feedback chatcmpl-0123456789abcdef down
    """
    from ..classifier.online.experience import Experience
    from ..router.settings_sources import load_config

    path = load_config().experience
    if path is None or not path.exists():
        raise ConfigurationError("There is no experience yet, or it is switched off (experience = 'none').")
    experience = Experience(path)
    try:
        if not experience.feedback(request_id, up=thumb == "up"):
            raise NotFoundError(
                f"No judged answer {request_id!r} is in {path}: only answers that the local model wrote to their end "
                "are kept, and of those the newest."
            )
    finally:
        experience.close()
    if as_json:
        json_output.show({"request_id": request_id, "feedback": thumb})
    else:
        typer.echo(f"Noted: {thumb} for {request_id}.")
