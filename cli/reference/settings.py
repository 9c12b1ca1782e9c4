"""docs/reference/settings.md: every setting of the router, of a local model, and of the environment."""

from __future__ import annotations

from typing import Any

from ...accounting.prices import Price
from ...local_engine.options import LocalOptions
from ...protocol.settings import PROCESS_VARIABLES
from ...router.accounting.budget import BudgetLimits
from ...router.accounting.prices import Prices
from ...router.config import CacheSettings, LocalModelOptions, Middle, RouterConfig
from ...router.privacy.rules import Privacy
from .fields import entries
from .markdown import code, page, table

_INTRODUCTION = """Settings stand in one TOML file: `config.toml` in `UPDRAFT_HOME`, or in the user's configuration
folder, or the file that `UPDRAFT_CONFIG` names. `UPDRAFT_NAME=value` overrides one setting, and a flag or keyword
overrides both. An unknown setting is an error. In a variable a setting of a table has the table's name before it
(`UPDRAFT_BUDGET_USD=5`), and names in a list are separated by commas. `[[middle]]`, `[prices.models]` and
`[privacy.patterns]` stand in the file only. `none` or an empty text turns an optional setting off.

The ledger and the folder of files are on by default, in the state folder. Nothing is kept for learning unless you ask
for it."""
_TABLES: dict[str, tuple[str, type[Any]]] = {
    "[[middle]]": ("Clouds between the device and the best one, from the smallest up.", Middle),
    "[prices]": ("US dollars per million tokens.", Prices),
    '[prices.models."NAME"]': ("US dollars per million tokens of one cloud model.", Price),
    "[budget], [budget_per_key], [budget_per_user]": ("Limits of one day (UTC).", BudgetLimits),
    "[privacy]": ("Rules that keep a request on the device.", Privacy),
    "[local_options]": ("How this process runs the local model.", LocalModelOptions),
    "[cache]": ("Answers to requests that ask exactly the same again.", CacheSettings),
}


def settings_page() -> str:
    parts = [part for name, (text, kind) in _TABLES.items() for part in (f"## `{name}`", text, _fields(kind))]
    return page(
        "Settings",
        _INTRODUCTION,
        "## Router",
        _fields(RouterConfig),
        *parts,
        "## Local models",
        "Fields of `LocalOptions`, for programs that open a local engine themselves.",
        _fields(LocalOptions),
        "## Environment",
        table(("variable", "meaning"), [(code(name), text) for name, text in PROCESS_VARIABLES.items()]),
    )


def _fields(kind: type[Any]) -> str:
    rows = [(code(each.name), code(each.kind), code(each.default), each.text) for each in entries(kind)]
    return table(("name", "type", "default", "meaning"), rows)
