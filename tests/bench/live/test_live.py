"""`updraft bench live`: written questions can be graded, the cloud knows them, and a real pair keeps its promise."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from real_model import SMOLLM2, needs_smollm2
from typer.testing import CliRunner
from updraft.bench.live.measure import QUALITIES
from updraft.bench.live.questions import written_questions
from updraft.bench.live.stub_cloud import stub_cloud
from updraft.classifier.calibration.bounds import max_losses, mean_lower_bound
from updraft.classifier.calibration.operating_point import DELTA
from updraft.cli.main import app


def test_there_are_300_different_questions_and_their_answers_are_right() -> None:
    questions = written_questions()
    assert len(questions) == len({question.prompt for question in questions}) == 300
    assert len({question.kind for question in questions[:200]}) == 11
    for question in questions:
        assert question.grade(question.answer), question.prompt
        assert question.grade(f"The answer is {question.answer}."), question.prompt
        assert not question.grade("I do not know."), question.prompt


def test_stub_cloud_answers_from_its_sheet() -> None:
    with stub_cloud({"What is 2 + 2?": "4"}) as url:

        def ask(text: str) -> str:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
            with urlopen(Request(f"{url}/chat/completions", body, {"content-type": "application/json"})) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]

        assert ask("What is 2 + 2?") == "4"
        with pytest.raises(HTTPError, match="400"):
            ask("What is 3 + 3?")


@needs_smollm2
@pytest.mark.soak  # two minutes of processor time; tests/cli/test_first_hour.py calibrates and routes in less
@pytest.mark.timeout(1200)
def test_of_a_real_model(tmp_path: Path) -> None:
    """200 questions: half of them make the policy, which stands behind what the other half gets."""
    fitted, held_out, routed = 50, 50, 100
    pytest.importorskip("sklearn")
    out = tmp_path / "out.json"
    options = ["--questions", "200", "--seeds", "1", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "live", "--local", str(SMOLLM2), *options])
    assert result.exit_code == 0, result.output
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["cloud_score"] == 1
    assert 0.1 < metrics["local_score"] < 0.5
    assert fitted + held_out + routed == metrics["questions"]
    for variant in ("with_hidden", "without_hidden"):
        # 50 rows fit the gates here: how they rank 100 others is luck, and the promise is not.
        shares = [metrics[f"{variant}.quality_{quality:g}.local_share"] for quality in QUALITIES]
        assert shares == sorted(shares)
        for quality in QUALITIES:
            assert metrics[f"{variant}.quality_{quality:g}.kept"] >= least_kept(quality, held_out, routed)
    assert metrics["engine.kept"] >= least_kept(0.8, held_out, routed)
    assert metrics["local_score"] < least_kept(0.7, held_out, routed), "to keep everything local fails here"


def least_kept(quality: float, held_out: int, routed: int, chance: float = 1e-3) -> float:
    """The share of right answers that a kept promise falls below with at most `chance`; the cloud is always right.

    Thresholds let at most `lost` of the held-out rows be lost. Held-out and routed rows are divided at random, so of
    the first `lost + n` losses on the way to bolder thresholds as few as `lost` are held out with a hypergeometric
    chance; only then are `n` of the routed rows lost.
    """
    delta = DELTA * 0.9  # a tenth is for the bound on the cloud's score
    alpha = (1 - quality) * mean_lower_bound(1.0, held_out, DELTA * 0.1)
    lost = max_losses(held_out, alpha, delta)
    if lost < 0:
        return 1.0
    law = pytest.importorskip("scipy.stats").hypergeom
    n = next(n for n in range(1, routed + 1) if law.cdf(lost, held_out + routed, lost + n, held_out) <= chance)
    return 1 - (n - 1) / routed


def test_least_kept_matches_random_halvings() -> None:
    """Losses in a random order: thresholds go as far as the held-out rows allow, and lose what they lose elsewhere."""
    rng = np.random.default_rng(0)
    held_out, routed, chance = 50, 100, 0.1
    for quality in QUALITIES:
        least = least_kept(quality, held_out, routed, chance)
        alpha = (1 - quality) * mean_lower_bound(1.0, held_out, DELTA * 0.1)
        lost = max_losses(held_out, alpha, DELTA * 0.9)
        below = 0
        for _ in range(2000):
            held = rng.permutation(held_out + routed) < held_out  # of all rows, the boldest last
            stays = np.cumsum(held) <= lost
            below += 1 - (stays & ~held).sum() / routed < least
        assert below / 2000 <= chance + 0.02
        assert least_kept(quality, held_out, routed, 1e-3) <= least
