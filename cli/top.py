"""`updraft top`: live load of a gateway and its nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared import json_output, options

if TYPE_CHECKING:
    from rich.table import Table

_TIMEOUT_S = 10.0
_P = "updraft_gateway_"


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics of a gateway at one moment."""

    # Time of the scrape, in seconds of `time.monotonic`.
    at: float
    # Values by metric name, then by sorted labels.
    samples: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]

    @classmethod
    def of(cls, text: str, at: float) -> Scrape:
        from prometheus_client.parser import text_string_to_metric_families

        samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return cls(at, samples)

    def sum(self, name: str, **labels: str) -> float:
        required = set(labels.items())
        return sum(value for pairs, value in self.samples.get(_P + name, {}).items() if required <= set(pairs))


def facts(now: Scrape, before: Scrape | None, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures for `--json`. Rates cover the time between the two scrapes; None without an earlier scrape."""

    def rate(name: str) -> float | None:
        return None if before is None else (now.sum(name) - before.sum(name)) / max(1e-9, now.at - before.at)

    def share(part: str, whole: str) -> float | None:
        parts, wholes = (now.sum(name) - (before.sum(name) if before else 0.0) for name in (part, whole))
        return parts / wholes if wholes > 0 else None

    return {
        "requests_per_s": rate("requests_total"),
        "prompt_tokens_per_s": rate("prompt_tokens_total"),
        "completion_tokens_per_s": rate("completion_tokens_total"),
        "mean_ttft_s": share("ttft_seconds_sum", "ttft_seconds_count"),
        "mean_tpot_s": share("tpot_seconds_sum", "tpot_seconds_count"),
        "slo_share": share("slo_streams_met_total", "slo_streams_total"),
        "waiting": int(now.sum("waiting")),
        "refused": int(now.sum("refused_total")),
        "cost_usd": now.sum("cost_usd_total"),
        "nodes": [
            {**node, "breaker_trips": int(now.sum("node_breaker_trips_total", node=node["url"]))} for node in nodes
        ],
    }


def top(
    url: Annotated[str, typer.Argument(help="Address of the gateway.")] = "http://127.0.0.1:4115",
    api_key_env: Annotated[str | None, options.key_env("a key of scopes usage and admin")] = None,
    api_key_file: Annotated[Path | None, options.key_file("a key of scopes usage and admin")] = None,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table instead of a live display.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Show a gateway's requests, tokens, latency and queue, and the state of each node, live.

    Rates and means cover the time between two updates; with --once, means cover the time since the gateway's start.
    The key needs the scopes usage and admin; a gateway with --no-auth needs no key.

    \b
    Examples
      updraft top http://127.0.0.1:4115 --api-key-env ADMIN_KEY
      updraft top --once --json
    """
    import httpx

    key = options.given_key(api_key_env, api_key_file)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S) as client:
        now, nodes = _fetch_state(client)
        figures = facts(now, None, nodes)
        if as_json:
            json_output.show(figures)
            return
        from rich.live import Live

        from .shared.console import Console

        if once:
            Console().print(_table(figures))
            return
        with Live(_table(figures), console=Console(), auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                before, (now, nodes) = now, _fetch_state(client)
                live.update(_table(facts(now, before, nodes)), refresh=True)


def _fetch_state(client: Any) -> tuple[Scrape, list[dict[str, Any]]]:
    """Fetch metrics and nodes. Raises CloudUnreachableError, or ConfigurationError if the gateway refuses the key."""
    import httpx

    from ..protocol.errors import CloudUnreachableError, ConfigurationError

    try:
        metrics, nodes = client.get("/metrics"), client.get("/admin/nodes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CloudUnreachableError(f"No gateway answers at {client.base_url}: {error}. Check the address.") from error
    for response in (metrics, nodes):
        if response.status_code in (401, 403):
            raise ConfigurationError("The gateway needs a key with scopes usage and admin: name it with --api-key-env.")
        if response.status_code != 200:
            raise CloudUnreachableError(f"{response.url.path} answered {response.status_code}: is it a gateway?")
    return Scrape.of(metrics.text, time.monotonic()), nodes.json()["nodes"]


def _table(figures: dict[str, Any]) -> Table:
    from rich.markup import escape

    from .shared.tables import columns

    title = (
        f"{_shown(figures['requests_per_s'])} requests/s   {_shown(figures['completion_tokens_per_s'])} tokens/s   "
        f"TTFT {_shown(figures['mean_ttft_s'], ' s')}   TPOT {_shown(figures['mean_tpot_s'], ' s')}   "
        f"in SLO {_shown(figures['slo_share'])}   waiting {figures['waiting']}   refused {figures['refused']}   "
        f"{figures['cost_usd']:.2f} USD"
    )
    table = columns("node", "state", "models", "in flight", "trips", right=("in flight", "trips"), title=title)
    for node in figures["nodes"]:
        state = "up" if node["healthy"] else f"down: {node['reason']}"
        texts = map(escape, (node["url"], state, ", ".join(node["models"])))
        table.add_row(*texts, str(node["in_flight"]), str(node["breaker_trips"]))
    return table


def _shown(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3g}{unit}"
