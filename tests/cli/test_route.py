"""`updraft route`: decisions on the requests of a file, and their cost, without an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CLOUD = ("--cloud-url", "http://127.0.0.1:9/v1", "--cloud-model", "big")


def test_a_file_is_routed_without_a_call(in_process: Any, tmp_path: Path) -> None:
    file, home = tmp_path / "requests.jsonl", tmp_path / "home"
    file.write_text('{"prompt": "hello", "max_tokens": 10}\n\n{"prompt": "hello"}\n')
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text("[prices]\ncloud_input = 1\ncloud_output = 1000\n")
    done = in_process("route", str(file), *CLOUD, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    first, second = shown["requests"]
    assert (first["tier"], first["cloud_chance"], second["cloud_usd"]) == ("cloud", 1.0, None)
    assert 0.01 < first["cloud_usd"] == first["expected_usd"] < 0.0102, "ten tokens of a thousandth of a dollar"
    assert shown["forecast"]["requests_cloud"] == 2 and shown["forecast"]["expected_usd"] is None
    told = in_process("route", str(file), *CLOUD, "--forecast")
    assert "requests cloud: 2" in told.stdout and "hello" not in told.stdout


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no request"),
        ('{"prompt": "hi"}\n\n[1]', "line 3: not a JSON object"),
        ('\n{"messages": 3}', "line 2: messages must be"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_line_is_named(in_process: Any, tmp_path: Path, text: str | None, fault: str) -> None:
    file = tmp_path / "requests.jsonl"
    if text is not None:
        file.write_text(text)
    done = in_process("route", str(file), *CLOUD)
    assert done.returncode == 2 and fault in done.stderr, done.stderr
