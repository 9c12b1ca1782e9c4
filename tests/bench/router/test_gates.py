"""`updraft bench gates`, from the packaged pair's answers to figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from updraft.cli.main import app

pytest.importorskip("onnxruntime", reason="needs the [edge] extra")
pytest.importorskip("llama_cpp", reason="needs the [edge] extra")
pytest.importorskip("torch", reason="needs the [cloud] extra")


def test_of_the_packaged_pair(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "gates", "--tasks", "120", "--json", str(out)])
    assert result.exit_code == 0, result.output
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["tasks"] == 120
    assert metrics["gate3.auroc_wrong"] > metrics["gate1.auroc_wrong"] > 0.6
    assert 0 < metrics["gate3.ece"] < 0.2
    assert metrics["unchanged.casing"] == metrics["unchanged.blanks"] == 1
    assert metrics["unchanged.typo"] > 0.9
    assert metrics["risk_0.1"] <= 0.1
    assert metrics["always_over_hindsight_0.1"] > metrics["share_over_hindsight_mean_0.1"] > 0.9
    for gate in ("gate1", "gate3"):
        assert 0 < metrics[f"decision_ms.{gate}.cpu_p50"] < 5
