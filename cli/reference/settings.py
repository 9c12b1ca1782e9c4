"""docs/reference/settings.md: every setting of the router, of a local model, and of the environment."""

from __future__ import annotations

from typing import Any

from ...accounting.prices import Price
from ...local_engine.options import LocalOptions
from ...protocol.settings import PROCESS_VARIABLES
from ...router.accounting.budget import BudgetLimits
from ...router.accounting.prices import Prices
from ...router.config import CacheSettings, CloudTierConfig, LocalModelOptions, RouterConfig
from ...router.privacy.rules import Privacy
from .fields import entries
from .markdown import code, page, table

_INTRODUCTION = """Settings are read from one TOML file: `config.toml` in `UPDRAFT_HOME` or in the user's configuration
folder, or the file that `UPDRAFT_CONFIG` names. `UPDRAFT_NAME=value` overrides one setting, and a flag or keyword
overrides both. Unknown settings are errors. The variable of a setting in a table starts with the table's name
(`UPDRAFT_BUDGET_USD=5`), and lists are separated by commas. `[[middle_tiers]]`, `[prices.models]` and
`[privacy.patterns]` can be set in the file only. `none` or an empty text turns an optional setting off. A table
`[serve]` takes the options of [`updraft serve`](cli.md#updraft-serve).

The ledger and the folder of files are on by default, in the state folder. Nothing is recorded for learning unless you
turn it on."""
_TABLES: dict[str, tuple[str, type[Any]]] = {
    "[[middle_tiers]]": ("Clouds between the device and the best cloud, smallest model first.", CloudTierConfig),
    "[prices]": ("US dollars per million tokens.", Prices),
    '[prices.models."NAME"]': ("US dollars per million tokens of one cloud model.", Price),
    "[budget], [budget_per_key], [budget_per_user]": ("Limits per budget period, in UTC.", BudgetLimits),
    "[privacy]": ("Rules that keep a request on the device.", Privacy),
    "[local_options]": ("Options of the local model's engine.", LocalModelOptions),
    "[cache]": ("Cache of answers to identical requests.", CacheSettings),
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
    rows = [(code(entry.name), code(entry.kind), code(entry.default), entry.text) for entry in entries(kind)]
    return table(("name", "type", "default", "meaning"), rows)
