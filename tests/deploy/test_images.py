"""The Dockerfile builds from named versions, installs what exists, and leaves no image running as root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("gateway", "node-cpu", "node-cuda")


def stages() -> dict[str, tuple[str, list[str]]]:
    """By name: what each is built on, and its instructions."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    by_stage: dict[str, tuple[str, list[str]]] = {}
    for line in filter(None, lines):
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            by_stage[start[2]] = (start[1], instructions := [])
        else:
            instructions.append(line)  # pyright: ignore[reportPossiblyUnboundVariable]
    return by_stage


def test_images_run_as_somebody_without_rights() -> None:
    for target in TARGETS:
        _, instructions = stages()[target]
        assert "USER 10001:10001" in instructions
        after = instructions[instructions.index("USER 10001:10001") :]
        assert [line.split()[0] for line in after] == ["USER", "EXPOSE", "ENTRYPOINT"]


def test_bases_have_a_version_and_no_secret_is_an_argument() -> None:
    by_stage = stages()
    for base, instructions in by_stage.values():
        assert base in by_stage or re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base)
        assert not [line for line in instructions if line.startswith("ARG")]
        assert not [line for line in instructions if re.search(r"(?i)(key|token|password)=", line)]


def test_installed_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = set(re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")))
    assert {"postgres,redis,otel", "cloud,otel"} == wanted
    assert {extra for each in wanted for extra in each.split(",")} <= set(project["optional-dependencies"])
