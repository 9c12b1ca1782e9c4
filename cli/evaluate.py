"""`updraft eval`: accuracy, cloud share and cost on the packaged tasks or on the user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..protocol.errors import ConfigurationError, UpdraftError
from .shared import json_output, options
from .shared.help_panels import shows
from .shared.option_groups import OmittedFields
from .shared.options import Tier

if TYPE_CHECKING:
    from ..bench.cascade.run import Stage
    from ..classifier.grading.questions import Question
    from ..router.config import RouterConfig

NAMES = {Tier.LOCAL: "local", Tier.CLOUD: "cloud", Tier.AUTO: "routed"}


@shows(*options.USUAL, "--tasks", "--file", "--tier", "--max-concurrency", "--seed", "--json")
def evaluate(
    *,
    tasks: Annotated[
        int | None, typer.Option(min=1, max=options.MAX_TASKS, help="Number of held-out demo tasks to ask. [200]")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help='File of tasks to ask instead: JSON Lines of {"prompt", "answer", "match"}.')
    ] = None,
    tier: Annotated[
        list[Tier] | None, typer.Option(help="Tier to measure; repeatable. [all that are configured]")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, max=256, help="Maximum questions in flight to the cloud.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed that selects the tasks.")] = 0,
    pair: Annotated[options.Pair, OmittedFields("tool_call_parser", "chat_template")],
    json_path: json_output.File = None,
) -> None:
    """Ask the router and each tier alone the same questions, and compare their answers.

    A task file holds one JSON object per line. "match" selects how a reply is compared with the answer: "agree" (the
    default: same meaning), "exact", "contains", or "number" (the reply's last number).
    Exit code 1 if any question got no answer.

    \b
    Examples
      updraft eval --local pocket --tasks 2000 --json out.json
      updraft eval --file mine.jsonl --local model.gguf --cloud-url https://host/v1 --cloud-model big
      echo '{"prompt": "What is 2 + 2?", "answer": 4, "match": "number"}' > mine.jsonl
    """
    if tasks is not None and file is not None:
        raise ConfigurationError("--tasks and --file are mutually exclusive: give one of them.")
    config = pair.config()
    from ..bench.cascade.questions import pocket_questions
    from ..bench.cascade.run import by_kind, draft_figures, errors, figures
    from ..classifier.grading.questions import read_questions
    from .shared.console import Console
    from .shared.measuring import run_stages
    from .shared.tables import accuracy_table, kinds_table
    from .shared.watch import Watch

    questions = read_questions(file) if file is not None else pocket_questions(tasks or 200, seed)
    watch = Watch(Console(stderr=True))
    with options.with_cloud(config, watch.say, nodes=2) as running:
        outcomes = run_stages(running, _stages(running, questions, tier, max_concurrency), watch)
    rows = {name: figures(outcome) for name, outcome in outcomes.items()}
    result: dict[str, Any] = {"n": len(questions), "tiers": list(rows), **rows, "by_kind": by_kind(outcomes)}
    result["errors"] = errors(outcomes.values())
    if "routed" in outcomes:
        result["draft"] = draft_figures(outcomes["routed"])
        result["routed"]["quality_kept"] = quality_kept(rows)
    console = Console(stderr=json_output.is_stdout(json_path))
    console.print(accuracy_table(rows))
    console.print(kinds_table(result["by_kind"], list(rows)))
    json_output.write(json_path, result)
    check_answered(result["errors"])


def check_answered(errors: Mapping[str, Any]) -> None:
    """Raise UpdraftError if questions got no answer. `errors` is the result of `bench.cascade.run.errors`."""
    if errors["count"]:
        kinds = ", ".join(f"{n} {kind}" for kind, n in errors["by_kind"].items())
        raise UpdraftError(f"{errors['count']} questions got no answer: {kinds}. First error: {errors['first']}")


def quality_kept(rows: dict[str, dict[str, Any]]) -> float | None:
    """Return routed accuracy divided by cloud accuracy; None if either was not measured or the cloud's is 0."""
    if "cloud" not in rows or "routed" not in rows or not rows["cloud"]["accuracy"]:
        return None
    return rows["routed"]["accuracy"] / rows["cloud"]["accuracy"]


def _stages(config: RouterConfig, questions: list[Question], tiers: list[Tier] | None, concurrency: int) -> list[Stage]:
    from ..bench.cascade.run import Stage

    missing = {Tier.LOCAL: config.local is None, Tier.CLOUD: config.cloud_url is None, Tier.AUTO: False}
    if absent := [tier for tier in tiers or [] if missing[tier]]:
        option = "--local" if absent[0] is Tier.LOCAL else "--cloud-url"
        raise ConfigurationError(f"No {absent[0]} tier is configured: name its model with {option}.")
    chosen = tiers or [tier for tier in NAMES if not missing[tier]]
    return [
        Stage(NAMES[tier], tier.value, questions, 1 if tier is Tier.LOCAL else concurrency)
        for tier in dict.fromkeys(chosen)
    ]
