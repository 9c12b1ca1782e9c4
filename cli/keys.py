"""`updraft keys create|import|list|rotate|revoke|audit`: the API keys of a running gateway."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..protocol.errors import ConfigurationError
from ..protocol.unicode_forms import read_text
from .shared import json_output, options, output
from .shared.command_line import CommandLine

if TYPE_CHECKING:
    from ..cloud_engine.gateway.access.database import KeyDatabase, KeyRecord

app = CommandLine(help="Manage the API keys of a gateway. Changes take effect within a second, without a restart.")

KeyFile = Annotated[
    Path | None, typer.Option("--keys", metavar="PATH", help="Key database. [keys.sqlite3 in the state folder]")
]
Which = Annotated[str, typer.Argument(metavar="KEY", help="Name or id of the key; see updraft keys list --json.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key: letters, digits, dots, dashes, underscores.")],
    keys: KeyFile = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="Permission of the key: inference, usage, admin or node; repeatable. [inference]"),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant of the key; a tenant's keys share cached prefixes. [the key's name]")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", rich_help_panel="Limits", help="Model that the key may use; repeatable. [all]"),
    ] = None,
    priority: Annotated[
        Literal["interactive", "escalation", "batch"], typer.Option(help="Priority of the key's requests in the queue.")
    ] = "interactive",
    expires_in_days: Annotated[float | None, typer.Option(min=0, help="Days until expiry. [never]")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per minute.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum requests in flight.")] = None,
    usd_per_day: Annotated[float | None, typer.Option(min=0, help="Budget in US dollars per UTC day.")] = None,
    usd_per_month: Annotated[float | None, typer.Option(min=0, help="Budget in US dollars per UTC month.")] = None,
    as_json: json_output.Flag = False,
) -> None:
    """Create a key and print it. It cannot be shown again: only its hash is stored.

    \b
    Examples
      updraft keys create team-a
      updraft keys create operator --scope admin --scope usage
      updraft keys create nightly --priority batch --usd-per-day 5 --expires-in-days 90
    """
    from ..cloud_engine.gateway.access.database import KeyDatabase, NewKey
    from ..cloud_engine.gateway.access.principal import SCOPES
    from ..protocol.decoding import convert

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrency": max_concurrency,
        "usd_per_day": usd_per_day,
        "usd_per_month": usd_per_month,
    }
    for unknown in set(scopes or ()) - set(SCOPES):
        raise typer.BadParameter(f"{unknown!r} is not one of {', '.join(SCOPES)}.", param_hint="--scope")
    fields = {"name": name, "tenant": tenant, "scopes": scopes, "priority": priority, "models": models}
    new = convert({**fields, "limits": limits, "expires_in_days": expires_in_days}, NewKey)
    _print_key(*KeyDatabase(options.key_database(keys)).create(new, _actor()), as_json)


@app.command("import")
def import_keys(
    file: Annotated[Path, typer.Argument(help="Key file with one line name:sha256 per key.")],
    keys: KeyFile = None,
    as_json: json_output.Flag = False,
) -> None:
    """Import the keys of an older gateway from its text file. The keys stay valid."""
    from ..cloud_engine.gateway.access.database import KeyDatabase

    text = read_text(file, ConfigurationError)
    imported = KeyDatabase(options.key_database(keys)).take_over(text, _actor())
    if as_json:
        return json_output.show([_facts(record) for record in imported])
    return output.echo("\n".join(f"{record.principal.name} ({record.principal.key_id})" for record in imported))


@app.command("list")
def list_keys(keys: KeyFile = None, as_json: json_output.Flag = False) -> None:
    """List the keys: name, tenant, scopes, models, priority, limits and expiry. --json also prints ids."""
    from rich.markup import escape

    from .shared.console import Console
    from .shared.tables import columns

    records = _database(keys).keys()
    if as_json:
        return json_output.show([_facts(record) for record in records])
    table = columns("name", "tenant", "scopes", "models", "priority", "limits", "expires", fold=True)
    for facts in map(_facts, records):
        limits = ", ".join(f"{name} {value:g}" for name, value in facts["limits"].items()) or "none"
        models, scopes = ", ".join(facts["models"]) or "all", ", ".join(facts["scopes"])
        words = (facts["name"], facts["tenant"], scopes, models, facts["priority"], limits)
        table.add_row(*map(escape, words), "never" if facts["expires_at"] is None else _day(facts["expires_at"]))
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(table).maximum)  # do not wrap names
    return console.print(table)


@app.command()
def rotate(
    key: Which,
    overlap_s: Annotated[
        float, typer.Option("--overlap-s", min=0, help="Seconds for which the old key stays valid.")
    ] = 0.0,
    keys: KeyFile = None,
    as_json: json_output.Flag = False,
) -> None:
    """Replace a key by a new one with the same name, id and permissions, and print the new key once.

    \b
    Example
      updraft keys rotate team-a --overlap-s 3600
    """
    from ..cloud_engine.gateway.access.database import KeyRotation
    from ..protocol.decoding import convert

    rotation = convert({"overlap_s": overlap_s}, KeyRotation)
    _print_key(*_database(keys).rotate(key, _actor(), rotation), as_json)


@app.command()
def revoke(key: Which, keys: KeyFile = None, as_json: json_output.Flag = False) -> None:
    """Revoke a key: within a second, all gateways that use this database refuse it."""
    record = _database(keys).revoke(key, _actor())
    name, key_id = record.principal.name, record.principal.key_id
    facts = {"id": key_id, "name": name, "revoked": True}
    json_output.tell(facts, f"The key {name} ({key_id}) is revoked.", as_json=as_json)


@app.command()
def audit(keys: KeyFile = None, as_json: json_output.Flag = False) -> None:
    """List changes to keys, newest first: time, actor, action and key."""
    import msgspec

    entries = _database(keys).audit()
    if as_json:
        return json_output.show(msgspec.to_builtins(entries))
    for entry in entries:
        output.echo(f"{_day(entry.at)}  {entry.actor}  {entry.action}  {entry.name} ({entry.key_id})")
    return None


def _database(keys: Path | None) -> KeyDatabase:
    from ..cloud_engine.gateway.access.database import KeyDatabase

    return KeyDatabase.existing(options.key_database(keys))


def _facts(record: KeyRecord) -> dict[str, Any]:
    from ..cloud_engine.gateway.access.routes import public_fields

    return public_fields(record)


def _print_key(record: KeyRecord, key: str, as_json: bool) -> None:
    json_output.tell({**_facts(record), "key": key}, key, as_json=as_json)


def _actor() -> str:
    import psutil

    return f"{psutil.Process().username()} (on this machine)"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
