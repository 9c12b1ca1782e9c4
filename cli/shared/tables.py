"""Tables for the results of commands."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from ...bench.cascade.run import Reply, TaskOutcome
    from ...bench.kernels.measure import Row

TITLES = {"local": "local only", "cloud": "cloud only", "routed": "routed"}


def columns(*headings: str, right: Collection[str] = (), title: str | None = None, fold: bool = False) -> Table:
    """Return an empty table; headings in `right` are right-aligned. `fold`: wrap long cells instead of cutting them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        justify: Literal["right", "left"] = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, overflow="fold" if fold else "ellipsis", no_wrap=justify == "right")
    return table


def accuracy_table(rows: Mapping[str, Mapping[str, Any]], title: str | None = None) -> Table:
    """Return a table of `bench.cascade.run.figures` with one line per tier."""
    figures = ("right", "95 %\ninterval", "to\ncloud", "tokens\nlocal", "tokens\ncloud", "cost", "p50\nms", "p95\nms")
    table = columns("", *figures, right=figures, title=title)
    for name, row in rows.items():
        low, high = row["accuracy_interval"]
        table.add_row(
            f"[bold]{TITLES[name]}[/bold]",
            f"{row['accuracy']:.1%}",
            f"{100 * low:.1f}-{100 * high:.1f}",
            f"{row['cloud_share']:.0%}",
            f"{row['tokens']['local']:,}",
            f"{row['tokens']['cloud']:,}",
            dollars(row["cost_usd"], ".4f"),
            number(row["latency_ms"]["p50"], ".0f"),
            number(row["latency_ms"]["p95"], ".0f"),
        )
    return table


def kinds_table(kinds: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Table:
    """Return a table of the accuracy per kind of question."""
    from rich.markup import escape

    figures = ("n", *(TITLES[name] for name in names))
    table = columns("kind", *figures, right=figures, title="right, by kind")
    for kind, row in kinds.items():
        table.add_row(escape(kind), f"{row['n']:.0f}", *(f"{row[name]:.0%}" for name in names))
    return table


def kernels_table(rows: Sequence[Row], device: str) -> Table:
    """Return a table with one line per case and implementation. A case's name is on its first line only."""
    figures = ("median\nus", "p20-p80\nus", "GB/s", "TFLOP/s", "of the\nlimit", "limited by")
    table = columns("kernel", "by", *figures, right=figures, title=f"kernels on {device}")
    shown = ""
    for row in rows:
        name, shown = "" if row.case == shown else row.case, row.case
        if row.median_us is None:
            table.add_row(name, row.implementation, "-", row.note)
            continue
        table.add_row(
            name,
            row.implementation,
            number(row.median_us, ",.1f"),
            f"{number(row.p20_us, ',.1f')}-{number(row.p80_us, ',.1f')}",
            number(row.gb_per_s, ",.0f"),
            number(row.tflop_per_s, ",.0f"),
            number(row.share, ".0%"),
            row.bound,
        )
    return table


def examples_table(replies: Sequence[Reply]) -> Table:
    """Return a table of questions with answer, tier and reason."""
    from rich.markup import escape

    table = Table(title="example answers", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    for heading, ratio in (("question", 4), ("answer", 4), ("answered by", 2), ("why", 3)):
        table.add_column(heading, ratio=ratio)
    for reply in replies:
        info = reply.info
        mark = "[green]right[/green]" if reply.right else "[red]wrong[/red]"
        where = "" if info is None else info.tier if info.route == info.tier else f"{info.tier} ({info.route})"
        reason = "" if info is None else info.reason
        answer = f"{escape(shortened(reply.text))} [{mark}]"
        table.add_row(escape(shortened(reply.question.prompt)), answer, where, escape(reason))
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of labelled lines without a frame."""
    table = Table.grid(padding=(0, 2))
    for label, text in facts.items():
        table.add_row(f"[bold]{label}[/bold]", text)
    return table


def examples_of(outcome: TaskOutcome, n: int = 5) -> list[Reply]:
    """Return up to `n` typical replies, alternating between routes and preferring kinds of question not yet chosen."""
    answered = sorted((r for r in outcome.replies if r.info is not None), key=lambda r: len(r.question.prompt + r.text))
    # Move the shortest third of the exchanges to the end, because short exchanges are not typical.
    typical = answered[len(answered) // 3 :] + answered[: len(answered) // 3]
    of_route: dict[str, list[Reply]] = {}
    for reply in typical:
        of_route.setdefault(reply.info.route if reply.info else "", []).append(reply)
    chosen: list[Reply] = []
    for route in itertools.cycle(sorted(of_route)):
        if len(chosen) == min(n, len(answered)):
            break
        kinds = [reply.question.kind for reply in chosen]
        unused = [reply for reply in of_route[route] if reply not in chosen]
        chosen += sorted(unused, key=lambda reply: kinds.count(reply.question.kind))[:1]
    return chosen


def shortened(text: str, most: int = 160) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 3] + "..."


def dollars(value: float | None, form: str) -> str:
    """Return the cost in US dollars, or `unknown` if it is None because a model has no price."""
    return "unknown" if value is None else f"${value:{form}}"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
