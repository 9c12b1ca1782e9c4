"""`updraft route`: where the requests of a file would go, and what they would cost, without an answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..protocol.errors import InvalidRequestError
from .shared import json_output, options, output
from .shared.help_panels import shows
from .shared.option_groups import OmittedFields

if TYPE_CHECKING:
    from ..router.config import RouterConfig
    from ..router.forecast import RouteForecast


@shows(*options.USUAL, "--forecast", "--json")
def route(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help='Requests as JSON lines: chat requests, or {"prompt": "..."}.')
    ],
    pair: Annotated[options.Pair, OmittedFields("tool_call_parser")],
    forecast: Annotated[bool, typer.Option("--forecast", help="Print only the sums over the file.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Show the tier, the reason and the expected cost of each request in a file. No model answers.

    Gates that read the local answer cannot judge: "judged" requests go to the cloud at the policy's calibrated share.

    \b
    Examples
      updraft route requests.jsonl
      updraft route requests.jsonl --quality 0.9 --forecast
    """
    requests = _requests(file)
    decisions = asyncio.run(_decisions(pair.config(), requests, file))
    summary = _summary(decisions)
    if as_json:
        rows = [] if forecast else msgspec.to_builtins(decisions)
        json_output.show(summary if forecast else {"requests": rows, "forecast": summary})
        return
    if not forecast:
        for number, each in enumerate(decisions, 1):
            usd = "unknown" if each.expected_usd is None else f"{each.expected_usd:.6f} US dollars"
            output.echo(f"{number}: {each.tier}, expected cost {usd}: {each.reason}")
    for name, value in summary.items():
        output.echo(f"{name.replace('_', ' ')}: {'unknown' if value is None else value}")


def _requests(file: Path) -> list[tuple[int, bytes]]:
    """Return the chat requests in a file, each with its line. Raises InvalidRequestError, which names the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}.", param="file") from error
    bodies: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{file}, line {number}: not a JSON object ({error}).", param="file") from error
        if "messages" not in body and isinstance(prompt := body.get("prompt"), str):
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": prompt}]
        bodies.append((number, msgspec.json.encode({"model": "auto", **body})))
    if not bodies:
        raise InvalidRequestError(f"{file} has no request.", param="file")
    return bodies


async def _decisions(config: RouterConfig, bodies: Sequence[tuple[int, bytes]], file: Path) -> list[RouteForecast]:
    from ..protocol.http.wire import WireRequest
    from ..router.router import Router

    decisions: list[RouteForecast] = []
    router = Router(config)
    try:
        for number, body in bodies:
            try:
                decisions.append(await router.forecast(WireRequest("POST", "/v1/chat/completions", body=body)))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{file}, line {number}: {error.message}", param=error.param) from error
        return decisions
    finally:
        await router.close()


def _summary(decisions: Sequence[RouteForecast]) -> dict[str, Any]:
    tiers = Counter(each.tier for each in decisions)
    chances = [each.cloud_chance for each in decisions]
    spent, alone = [each.expected_usd for each in decisions], [each.cloud_usd for each in decisions]
    known = [chance for chance in chances if chance is not None]
    return {
        "requests": len(decisions),
        **{f"requests_{tier}": tiers[tier] for tier in ("local", "judged", "cloud")},
        "cloud_share": sum(known) / len(known) if len(known) == len(chances) else None,
        "expected_usd": None if None in spent else sum(filter(None, spent)),
        "all_in_cloud_usd": None if None in alone else sum(filter(None, alone)),
    }
