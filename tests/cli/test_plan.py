"""`updraft plan`: a table for people, JSON and a picture for others, and an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from updraft.cli.main import app
from updraft.protocol.errors import ConfigurationError

COSTS = {
    "steps": 0.02,
    "sequences": 1e-3,
    "prompt_tokens": 1e-4,
    "context_tokens": 1e-8,
    "prompt_pairs": 0,
    "chunks": 0,
}
COSTS |= {"cached_tokens": 300, "uncached_tokens": 1e-8, "largest_batch": 32}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    trace, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    rows = [{"timestamp": 40 * number, "input_length": 60, "output_length": 20 + number % 40} for number in range(60)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    costs.write_text(json.dumps({"metrics": {f"step_time_{name}": value for name, value in COSTS.items()}}))
    return [
        "plan",
        "--trace",
        str(trace),
        "--step-costs",
        str(costs),
        "--num-gpu-blocks-override",
        "64",
        "--max-model-len",
        "256",
    ]


def test_a_plan_is_printed_drawn_and_written_as_json(files: list[str], tmp_path: Path) -> None:
    wanted = ["--ttft-s", "0.2", "--tpot-s", "0.03", "--share", "0.9", "--usd-per-hour", "2", "--cloud-share", "0.3"]
    picture = tmp_path / "plan.png"
    shown = CliRunner().invoke(app, [*files, *wanted, "--compare", "--plot", str(picture)], catch_exceptions=False)
    plan = json.loads(CliRunner().invoke(app, [*files, *wanted, "--json"], catch_exceptions=False).stdout)
    assert f"{plan['nodes']} nodes meet the objective" in shown.stdout
    assert "times the tokens of static batching" in shown.stdout
    assert "--mode latency:" in shown.stdout
    assert f"--max-num-seqs {plan['limits']['max_num_seqs']} " in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    tried = {each["nodes"]: each for each in plan["tried"]}
    assert tried[plan["nodes"]]["share"] >= 0.9
    assert tried[plan["nodes"]]["usd_per_million"] > 0
    assert plan["with_device"]["nodes"] < plan["nodes"]


def test_impossible_plans_are_reported(files: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="Loosen the objective"):
        CliRunner().invoke(app, [*files, "--ttft-s", "0.001"], catch_exceptions=False)
