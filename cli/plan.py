"""`updraft plan`: estimates the number of nodes that a load needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared import json_output, options, output

if TYPE_CHECKING:
    from ..cloud_engine.planning.plan import FleetFigures


def plan(
    *,
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Requests: Azure's CSV, Mooncake's JSON Lines, or a gateway's ledger.")
    ],
    step_costs: Annotated[
        Path, typer.Option(metavar="JSON", help="Step times from updraft bench engine --only steps --json PATH.")
    ],
    num_gpu_blocks_override: Annotated[int, typer.Option(min=1, max=10_000_000, help="KV cache blocks per node.")],
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of requests to use from the trace.")
    ] = 1_000,
    rate: Annotated[
        float, typer.Option(min=0.001, max=1_000, help="Factor by which requests arrive faster than in the trace.")
    ] = 1.0,
    ttft_s: Annotated[float, typer.Option(min=0.001, max=3_600, help="Objective: seconds to the first token.")] = 1.0,
    tpot_s: Annotated[float, typer.Option(min=0.0001, max=3_600, help="Objective: seconds per later token.")] = 0.1,
    share: Annotated[float, typer.Option(min=0.5, max=1.0, help="Required share of requests in time.")] = 0.99,
    limits: options.BatchLimits,
    block_size: Annotated[int, typer.Option(min=1, max=1_024, help="Tokens per KV cache block.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Maximum tokens of prompt plus answer. [KV cache size]")
    ] = None,
    usd_per_hour: Annotated[float | None, typer.Option(min=0, max=1_000_000, help="Price of a node.")] = None,
    cloud_share: Annotated[
        float | None, typer.Option(min=0.001, max=1.0, help="Share of requests that escalate; also plan for them.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also simulate other modes and rates, static batching, and no paging.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Save a plot of the simulated fleets.")] = None,
    as_json: json_output.Flag = False,
) -> None:
    """Estimate how many nodes meet a latency objective, by simulation with the engine's own scheduler.

    \b
    Examples
      updraft bench engine --only steps --json costs.json
      updraft plan --trace AzureLLMInferenceTrace_conv.csv --step-costs costs.json --num-gpu-blocks-override 4096
      updraft plan --trace gateway.sqlite3 --step-costs costs.json --num-gpu-blocks-override 4096 \\
          --usd-per-hour 2 --cloud-share 0.4
    """
    from ..cloud_engine.engine.config import EngineConfig, settings_of
    from ..cloud_engine.planning.mode_limits import limits_from
    from ..cloud_engine.planning.plan import Planner, PlanObjective
    from ..cloud_engine.planning.simulation import NodeShape
    from ..cloud_engine.planning.step_time import read_costs
    from ..cloud_engine.planning.trace import faster, read_trace
    from .shared.plots import check_plotting, fleets_png

    if plot is not None:
        check_plotting()
    flags = asdict(limits)
    used = settings_of(limits_from(step_costs, flags.pop("mode"), limits.max_step_ms), **flags)
    config = EngineConfig(max_model_len=max_model_len, block_size=block_size, **used)
    shape = NodeShape(config, read_costs(step_costs), num_gpu_blocks_override)
    planner = Planner(
        faster(read_trace(trace, requests), rate), shape, PlanObjective(ttft_s, tpot_s, share), usd_per_hour
    )
    tried = planner.smallest()
    fleet = next(candidate for candidate in tried if candidate.share >= share)
    result: dict[str, Any] = {"nodes": fleet.nodes, "limits": used, "tried": [asdict(candidate) for candidate in tried]}
    if cloud_share is not None:
        result["with_device"] = asdict(planner.with_device(cloud_share))
    if compare:
        continuous, static = planner.static_tokens_per_s()
        result |= {
            "nodes_by_rate": planner.sensitivity(),
            "continuous_over_static": continuous / static,
            "preallocated": asdict(planner.preallocated(fleet.nodes)),
            "modes": {name: asdict(fleet) for name, fleet in planner.by_mode(fleet.nodes).items()},
        }
    if plot is not None:
        plot.write_bytes(fleets_png(tried, share))
    if as_json:
        json_output.show(result)
    else:
        _print(tried, fleet, result)


def _print(tried: list[FleetFigures], fleet: FleetFigures, result: dict[str, Any]) -> None:
    from .shared.console import Console
    from .shared.tables import columns, dollars

    headings = ("nodes", "within", "TTFT p50", "p99", "TPOT p50", "p99", "tokens/s", "busy", "waste", "$/M")
    table = columns(*headings, right=headings)
    table.padding = 0  # fit ten columns in a terminal
    for candidate in tried:
        times = (candidate.ttft_p50_s, candidate.ttft_p99_s, candidate.tpot_p50_s, candidate.tpot_p99_s)
        table.add_row(
            f"[bold]{candidate.nodes}[/bold]" if candidate is fleet else str(candidate.nodes),
            f"{candidate.share:.1%}",
            *(f"{1e3 * seconds:,.0f} ms" for seconds in times),
            f"{candidate.tokens_per_s:,.0f}",
            f"{candidate.busy:.0%}",
            f"{candidate.kv_waste:.0%}",
            dollars(candidate.usd_per_million, ".2f"),
        )
    Console(highlight=False).print(table)
    nodes = "1 node meets" if fleet.nodes == 1 else f"{fleet.nodes} nodes meet"
    output.echo(f"{nodes} the objective for {fleet.share:.1%} of the requests.")
    limits = result["limits"]
    output.echo(
        f"Each node runs with --max-num-seqs {limits['max_num_seqs']} "
        f"--max-num-batched-tokens {limits['max_num_batched_tokens']} --max-step-ms {limits['max_step_ms']}, "
        "as --mode and --step-costs set them. Speculation, prefix cache affinity and the network are not simulated."
    )
    if fleet.refused:
        output.echo(f"{fleet.refused} requests were refused: longer than a node's context, or the queue was full.")
    if device := result.get("with_device"):
        output.echo(f"If devices answer all requests that do not escalate: {device['nodes']} nodes.")
    for name, candidate in result.get("modes", {}).items():
        times = f"TTFT {1e3 * candidate['ttft_p50_s']:,.0f} ms (p99 {1e3 * candidate['ttft_p99_s']:,.0f})"
        times += f", TPOT {1e3 * candidate['tpot_p50_s']:,.1f} ms (p99 {1e3 * candidate['tpot_p99_s']:,.1f})"
        output.echo(f"--mode {name}: {candidate['share']:.1%} within the objective, {times}.")
    if "preallocated" in result:
        by_rate = ", ".join(
            f"{nodes or 'too many'} at {rate} times the rate" for rate, nodes in result["nodes_by_rate"].items()
        )
        waste, met = result["preallocated"]["kv_waste"], result["preallocated"]["share"]
        output.echo(f"Nodes needed: {by_rate}.")
        output.echo(f"Continuous batching: {result['continuous_over_static']:.1f} times the tokens of static batching.")
        output.echo(
            f"Without paging: {waste:.0%} of KV cache memory unused, {met:.1%} of requests within the objective."
        )
