"""`updraft bench live`: written questions can be graded, the cloud knows them, and a real pair keeps its promise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner
from updraft.bench.live.stub_cloud import stub_cloud
from updraft.bench.live.written import written_questions
from updraft.cli.main import app

MODEL = os.environ.get("UPDRAFT_TEST_SMOLLM2")


def test_there_are_300_different_questions_and_their_answers_are_right() -> None:
    questions = written_questions()
    assert len(questions) == len({question.prompt for question in questions}) == 300
    assert len({question.kind for question in questions[:200]}) == 11
    for question in questions:
        assert question.grade(question.answer), question.prompt
        assert question.grade(f"The answer is {question.answer}."), question.prompt
        assert not question.grade("I do not know."), question.prompt


def test_the_stub_cloud_knows_what_is_on_its_sheet() -> None:
    with stub_cloud({"What is 2 + 2?": "4"}) as url:

        def ask(text: str) -> str:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
            with urlopen(Request(f"{url}/chat/completions", body, {"content-type": "application/json"})) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]

        assert ask("What is 2 + 2?") == "4"
        with pytest.raises(HTTPError, match="400"):
            ask("What is 3 + 3?")


@pytest.mark.skipif(not MODEL, reason="UPDRAFT_TEST_SMOLLM2 names no model file")
@pytest.mark.timeout(1200)
def test_of_a_real_model(tmp_path: Path) -> None:
    """200 questions: half of them make the policy, which stands behind what the other half gets."""
    pytest.importorskip("sklearn")
    out = tmp_path / "out.json"
    options = ["--questions", "200", "--seeds", "1", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "live", "--local", str(MODEL), *options])
    assert result.exit_code == 0, result.output
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["cloud_score"] == 1
    assert 0.1 < metrics["local_score"] < 0.5
    for variant in ("with_hidden", "without_hidden"):
        # 50 rows fit the gates here: how they rank 100 others is luck, and the promise is not.
        shares = [metrics[f"{variant}.quality_{quality:g}.local_share"] for quality in (0.95, 0.9, 0.8, 0.7)]
        assert shares == sorted(shares)
        assert metrics[f"{variant}.quality_0.9.kept"] > 0.8
    assert metrics["engine.kept"] > 0.65
