"""A strict parser of Prometheus' text format 0.0.4: text that a scraper would reject or misread is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
_SAMPLE = re.compile(rf"(?P<name>{_NAME})(?:\{{(?P<labels>{_LABEL}(?:,{_LABEL})*)\}})? (?P<value>\S+)")


@dataclass
class Family:
    """One metric. `samples`: values by sample name and labels, as written in the text."""

    name: str
    help: str
    kind: str = ""
    samples: dict[tuple[str, str], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Family]:
    """Return the metric families by name. Raises AssertionError if the text violates the format."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    family = Family("", "")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, help_text = line.split(" ", 3)
            assert name not in families, f"{name} is declared twice"
            family = families[name] = Family(name, help_text)
        elif line.startswith("# TYPE "):
            _, _, name, family.kind = line.split(" ")
            assert name == family.name
            assert family.kind in ("counter", "gauge", "histogram")
            assert not family.samples
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match["name"] in _sample_names(family), line
            key = (match["name"], match["labels"] or "")
            assert key not in family.samples, line
            family.samples[key] = float(match["value"])
    for family in families.values():
        _check(family)
    return families


def _sample_names(family: Family) -> set[str]:
    if family.kind == "histogram":
        return {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return {family.name}


def _check(family: Family) -> None:
    assert family.kind, f"{family.name} has no type"
    assert (family.kind == "counter") == family.name.endswith("_total"), family.name
    if family.kind == "counter":
        assert all(value >= 0 for value in family.samples.values()), family.name
    if family.kind == "histogram":
        buckets = [(labels, value) for (name, labels), value in family.samples.items() if name.endswith("_bucket")]
        bounds = [float(labels.removeprefix('le="').removesuffix('"')) for labels, _ in buckets]
        counts = [value for _, value in buckets]
        assert bounds == sorted(set(bounds))
        assert bounds[-1] == float("inf")
        assert counts == sorted(counts)
        assert counts[-1] == family.samples[f"{family.name}_count", ""]
        assert f"{family.name}_sum" in {name for name, _ in family.samples}
