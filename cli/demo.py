"""`updraft demo`: a measured run of the whole cascade on this machine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared import json_output, options

if TYPE_CHECKING:
    from ..bench.cascade.run import Stage, TaskOutcome
    from ..classifier.grading.questions import Question
    from ..router.config import RouterConfig
    from .shared.console import Console
    from .shared.watch import Watch

MIN_TASKS = 20
CONCURRENCY = 8
LATENCY_SAMPLE = 24


def demo(
    tasks: Annotated[
        int, typer.Option(min=MIN_TASKS, max=options.MAX_TASKS, help="Number of held-out tasks to ask.")
    ] = 300,
    quality: options.Quality = None,
    seed: Annotated[int, typer.Option(help="Seed that selects the tasks.")] = 0,
    json_path: json_output.File = None,
    svg_path: Annotated[
        Path | None, typer.Option("--svg", metavar="PATH", help="Also save the final output as an SVG picture.")
    ] = None,
    kill_a_node: Annotated[
        bool, typer.Option("--kill-a-node", help="Kill one of the two nodes during the run; no answer is lost.")
    ] = False,
) -> None:
    """Watch a small model on this device and a larger one in a small cloud share real work.

    Starts two cloud nodes and a gateway as processes on free loopback ports. Asks the device alone, the cloud alone
    and the router the same questions, and compares accuracy with 95 % intervals, cloud share, tokens, cost and
    latency. Downloads nothing and stops all its processes. Exit code 1 if any question got no answer.

    \b
    Examples
      updraft demo
      updraft demo --tasks 400 --json out.json
      updraft demo --kill-a-node
    """
    from .evaluate import check_answered
    from .shared.console import Console
    from .shared.processes import signals_as_interrupts
    from .shared.watch import Watch

    started = time.monotonic()
    final = Console(stderr=json_output.is_stdout(json_path), record=True, width=110 if svg_path else None)
    with signals_as_interrupts():
        results, routed = _run(tasks, seed, kill_a_node, _config(quality), Watch(Console(stderr=True)))
    results["seconds"] = time.monotonic() - started
    _show(final, results, routed)
    if svg_path:
        final.save_svg(str(svg_path), title="updraft demo")
    json_output.write(json_path, results)
    check_answered(results["errors"])


def _config(quality: float | None) -> RouterConfig:
    """Return the default settings instead of the user's, so that the demo gives the same results everywhere."""
    from ..router.accounting.prices import Prices
    from ..router.config import RouterConfig

    prices = Prices(cloud_input=0.5, cloud_output=1.5)  # usual prices of a mid-size model; the pocket cloud is free
    config = RouterConfig(local="pocket", cloud_model="pocket-large", prices=prices)
    return config if quality is None else replace(config, quality=quality)


def _run(
    tasks: int, seed: int, kill_a_node: bool, config: RouterConfig, watch: Watch
) -> tuple[dict[str, Any], TaskOutcome]:
    """Return the figures for `--json`, and the outcome of the routed run."""
    from ..bench.cascade.questions import pocket_questions
    from ..bench.cascade.run import errors
    from .shared.measuring import run_stages
    from .shared.pocket_cloud import pocket_cloud

    questions = pocket_questions(tasks + LATENCY_SAMPLE, seed)
    with pocket_cloud(nodes=2, say=watch.say) as cloud:

        def attack(stage: Stage, done: int) -> None:
            """With --kill-a-node, kill a node after a third of the routed replies."""
            if kill_a_node and stage.name == "routed" and done == tasks // 3:
                cloud.nodes[0].kill()
                watch.say(f"Killed {cloud.nodes[0].name} (pid {cloud.nodes[0].pid}) with SIGKILL.")

        watch.say("Running: " + ", ".join(f"{name} (pid {pid})" for name, pid in cloud.pids.items()))
        config = replace(config, cloud_url=cloud.base_url, cloud_api_key=cloud.api_key, cloud_continues=True)
        outcomes = run_stages(config, _stages(questions[:tasks], questions[tasks:]), watch, on_reply=attack)
        lost = [child.name for child in (*cloud.nodes, cloud.gateway) if not child.alive]
    own = {"seed": seed, "pids": cloud.pids, "processes_lost": lost, "errors": errors(outcomes.values())}
    return {**_figures(outcomes, config), **own}, outcomes["routed"]


def _stages(questions: list[Question], sample: list[Question]) -> list[Stage]:
    """Return the stages of the demo. Runs with one request at a time measure the latency without load."""
    from ..bench.cascade.run import Stage

    return [
        Stage("local", "local", questions),
        Stage("cloud, one at a time", "cloud", sample),
        Stage("routed, one at a time", "auto", sample),
        Stage("cloud", "cloud", questions, CONCURRENCY),
        Stage("routed", "auto", questions, CONCURRENCY),
    ]


def _figures(outcomes: dict[str, TaskOutcome], config: RouterConfig) -> dict[str, Any]:
    from ..bench.cascade.run import by_kind, draft_figures, figures, latency, router_infos
    from .evaluate import quality_kept

    measured = {name: outcomes[name] for name in ("local", "cloud", "routed")}
    rows = {name: figures(outcome) for name, outcome in measured.items()}
    for name in ("cloud", "routed"):
        rows[name]["latency_loaded_ms"] = rows[name]["latency_ms"]
        rows[name]["latency_ms"] = latency(outcomes[f"{name}, one at a time"].replies)
    rows["routed"]["saved_usd"] = rows["cloud"]["cost_usd"] - rows["routed"]["cost_usd"]
    rows["routed"]["quality_kept"] = quality_kept(rows)
    return {
        "n": len(measured["routed"].replies),
        "quality": config.target.value,
        **rows,
        "routes": dict(Counter(info.route for info in router_infos(measured["routed"].replies))),
        "draft": draft_figures(measured["routed"]),
        "by_kind": by_kind(measured),
        "prices_usd_per_million_tokens": asdict(config.prices),
        "latency_sample": len(outcomes["cloud, one at a time"].replies),
    }


def _show(console: Console, results: dict[str, Any], outcome: TaskOutcome) -> None:
    from .shared.tables import accuracy_table, examples_of, examples_table, facts_table, kinds_table
    from .shared.tables import number as show

    rows = {name: results[name] for name in ("local", "cloud", "routed")}
    routed, draft = results["routed"], results["draft"]
    prices = results["prices_usd_per_million_tokens"]
    saved = routed["saved_usd"] / results["cloud"]["cost_usd"] if results["cloud"]["cost_usd"] else 0.0
    console.print(kinds_table(results["by_kind"], list(rows)))
    console.print(examples_table(examples_of(outcome)))
    console.print(accuracy_table(rows, title=f"{results['n']} held-out tasks, target quality {results['quality']:g}"))
    facts = {
        "quality": f"{show(routed['quality_kept'], '.1%')} of the cloud's quality kept, with "
        f"{routed['cloud_share']:.0%} of the questions in the cloud",
        "cost": f"${routed['cost_usd']:.5f}, {saved:.0%} less than cloud only (at ${prices['cloud_input']:g} / "
        f"${prices['cloud_output']:g} per million tokens in / out)",
        "drafts": f"{draft['accepted']:,} of {draft['proposed']:,} local tokens accepted on escalated requests "
        f"({show(draft['acceptance_rate'], '.0%')})",
        "latency": f"measured with one question in flight (cloud and routed: on {results['latency_sample']} other "
        f"tasks); the other figures of cloud and routed are measured with {CONCURRENCY} questions in flight",
    }
    if results["processes_lost"]:
        facts["died"] = f"{', '.join(results['processes_lost'])}; answers missing: {results['errors']['count']}"
    facts["time"] = f"{results['seconds']:.0f} s"
    console.print(facts_table(facts))
