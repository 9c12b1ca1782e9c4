"""`updraft bench escalation`, from real escalations of the packaged pair to figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from updraft.accounting.reported_usage import ReportedUsage
from updraft.bench.cascade.escalation import DraftedQuestion, EscalationFigures, figures
from updraft.cli.main import app
from updraft.protocol.errors import EngineError


def test_of_the_packaged_pair(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "escalation", "--tasks", "40", "--rounds", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["escalations"] >= 3
    assert metrics["different_answers"] == 0
    assert metrics["accepted_share"] > 0.5
    assert metrics["draft_over_none"] < 1.1  # a busy machine included


def escalation(draft: float, none: float, useless: float, text: str = "same") -> EscalationFigures:
    usage = ReportedUsage(completion_tokens=10, accepted=3, rejected=1)
    seconds_of = {"draft": draft, "none": none, "useless": useless}
    return EscalationFigures(
        {
            arm: [DraftedQuestion(seconds, text if arm == "draft" else "same", usage)]
            for arm, seconds in seconds_of.items()
        }
    )


def test_figures() -> None:
    summary = figures([escalation(1, 2, 2), escalation(2, 4, 5, "another"), escalation(3, 4, 4)])
    assert summary["draft_over_none"] == 0.5
    assert summary["useless_over_none"] == 1.0
    assert summary["different_answers"] == 1
    assert summary["accepted_share"] == 0.75


def test_nothing_escalated() -> None:
    with pytest.raises(EngineError, match="ask more"):
        figures([])
