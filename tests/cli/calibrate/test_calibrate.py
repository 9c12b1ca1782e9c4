"""`updraft calibrate`: from graded prompts, or both tiers live, to a policy that the router uses by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_provider import running_provider
from serving import serving
from updraft.classifier.grading.graded_data import read_graded
from updraft.classifier.policy.policy import Policy
from updraft.router.accounting.ledger import Ledger
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft_oracle import QUESTIONS, oracle

pytestmark = pytest.mark.slow  # such files come first

__all__ = ["oracle"]

NOWHERE = ["--cloud-url", "http://127.0.0.1:9/v1", "--cloud-model", "big"]
GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "routing" / "routellm_gsm8k.csv.gz"


def test_both_tiers_live_and_then_in_use(updraft, oracle: str, tmp_path: Path) -> None:
    """Paid answers are kept until the policy is made: at first it cannot be written."""
    pytest.importorskip("llama_cpp")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": question.prompt}) for question in QUESTIONS))
    pair = ["--local", "pocket", "--cloud-url", oracle, "--cloud-model", "oracle"]
    call = ["calibrate", "--live", str(len(QUESTIONS)), "--prompts", str(prompts), *pair]
    done = updraft(*call, "--out", "prompts.jsonl/policy")
    assert done.returncode == 2
    assert "Cannot write the policy to" in done.stderr
    (kept,) = (tmp_path / "home" / "calibrations").iterdir()
    assert "124 answered prompts are kept in" in done.stderr
    assert kept.stat().st_mode & 0o777 == 0o600
    assert QUESTIONS[1].prompt not in kept.read_text(), "answers and hashes of prompts, no prompt"
    with kept.open("a") as file:
        file.write('{"key": "half a li')  # as a killed process leaves it
    call += ["--cloud-share", "0.5", "--plot", "curve.png"]
    done = updraft(*call, "--save", "kept.jsonl", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "124 of 125 prompts were answered before" in done.stderr
    assert not kept.exists()
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "The curve is in curve.png." in done.stdout
    assert "At a promise level of 90%, on requests like these: at most 50.0% go to the cloud." in done.stdout
    assert "124 prompts, graded by agreement" in done.stdout
    assert "1 of 125 prompts failed" in done.stderr
    assert "To set this target: --cloud-share 0.5, cloud_share=0.5 in code, or cloud_share = 0.5 in " in done.stdout
    policy = Policy.load(tmp_path / "home" / "policies" / "pocket-small--oracle")
    assert policy.card.models == {"local": "pocket-small", "cloud": "oracle"}
    assert "signals" in policy.card.blocks["cascade"] and not policy.card.estimated_tokens
    assert policy.calibration.written.mean() == 10
    ledger = Ledger(tmp_path / "home" / "ledger.sqlite3")
    assert sorted(row.status for row in ledger.rows(limit=1000)) == [200] * 124 + [400] * 2, "each is paid for once"
    ledger.close()
    figures = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert 0.05 < figures["gain_rate"] < 0.95
    assert 0 < figures["cloud_share"] < 0.5
    rows = read_graded(tmp_path / "kept.jsonl")
    graded = [question.grade(row.answer or "") for question, row in zip(QUESTIONS[1:], rows, strict=True)]
    agreed = sum(right == (row.weak == 1) for right, row in zip(graded, rows, strict=True))
    assert agreed >= 0.9 * len(rows), "agreement with the right answer is nearly being right"
    done = updraft("ask", QUESTIONS[1].prompt, "--json", *pair)
    assert json.loads(done.stdout)["updraft"]["reason"].startswith("P(gain)"), done.stdout


def test_a_graded_file(updraft, tmp_path: Path) -> None:
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not there")
    rows = read_graded(GSM8K)[:300]
    data = tmp_path / "graded.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": r.prompt, "mixtral": r.weak, "gpt4": r.strong}) for r in rows))
    call = [
        "calibrate",
        "--data",
        str(data),
        "--weak",
        "mixtral",
        "--strong",
        "gpt4",
        "--local",
        "pocket",
        "--cloud-model",
        "gpt-4",
    ]
    done = updraft(*call, "--quality", "0.9", "--out", "policy")
    assert done.returncode == 0, done.stderr
    assert "mu" not in done.stdout.split(), "no formula"
    assert "routed answers score on average at least 90.0% of the cloud's score" in done.stdout.replace("\n", " ")
    card = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert card["models"] == {"local": "pocket-small", "cloud": "gpt-4"}
    assert card["data"][0]["name"] == "graded.jsonl"
    assert "At a promise level of 90%" in done.stdout
    strict = updraft(*call, "--quality", "0.9", "--promise", "no-loss", "--out", "strict")
    assert "Every method that leaves" in strict.stdout, strict.stderr
    assert "stay local although only the cloud is right" in strict.stdout
    again = updraft(*call, "--quality", "0.9", "--promise", "mean", "--out", "other", "--json", "mean.json")
    assert "Target quality 0.9 on average" in again.stdout, again.stderr
    assert "On average over repeated calibrations" in again.stdout
    figures = json.loads((tmp_path / "mean.json").read_text())["metrics"]
    assert "delta" not in figures
    held_out = Policy.load(tmp_path / "other").calibration
    assert figures["alpha"] == pytest.approx(0.1 * held_out.cloud.mean())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Give --data FILE, --live N with --prompts FILE, or --from-log FILE"),
        (["--data", "few.csv", "--judge", "x"], "the rows of --data are graded already"),
        (["--data", "few.csv", "--judge-url", "http://127.0.0.1:9/v1"], "need --judge"),
        (["--data", "few.csv", "--from-log", "few.csv"], "mutually exclusive"),
        (["--data", "few.csv", "--plot", "x.pdf"], "file name that ends in .png"),
        (["--live", "5"], "go together"),
        (["--data", "few.csv", "--save", "x"], "--save needs --live or --from-log"),
        (["--data", "few.csv", "--quality", "0.9", "--cost", "1"], "exclude each other"),
        (["--data", "few.csv", "--local", "none"], "No local model is configured"),
        (["--data", "few.csv", "--cloud-model", "big"], "at least 100 graded prompts"),
        (["--data", "few.csv"], "name the cloud model with --cloud-model"),
        (["--live", "5", "--prompts", "two.txt"], "has 2 prompts, but --live asks for 5"),
        (
            ["--live", "2", "--prompts", "two.txt", *NOWHERE],
            "at least 100 graded prompts, not 2",
        ),
    ],
)
def test_calls_that_make_no_sense(in_process, tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "few.csv").write_text("prompt,weak,strong\nWhat?,0,1\nHow?,1,1\n")
    (tmp_path / "two.txt").write_text("What?\n\nHow?\n")
    done = in_process("calibrate", *flags, env={"UPDRAFT_LOCAL": "pocket"})
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"UPDRAFT_OFFLINE": "true"}, "set offline to false"),
        ({"UPDRAFT_BUDGET_CLOUD_SHARE": "0.5"}, "set cloud_share of all budgets to 1"),
        ({"UPDRAFT_PRIVACY_BUILTIN": "email"}, "at least 100 graded prompts, not 98"),
    ],
)
def test_a_live_calibration_keeps_to_the_settings(
    in_process, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    lines = [f"Write to {i}@example.org" if i < 2 else f"What is {i}?" for i in range(100)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    call = ["calibrate", "--live", "100", "--prompts", "prompts.txt", *NOWHERE]
    done = in_process(*call, env={"UPDRAFT_LOCAL": "pocket", **settings})
    assert done.returncode == 2
    assert message in done.stderr
    assert ("2 of 100 prompts match a privacy rule" in done.stderr) == ("UPDRAFT_PRIVACY_BUILTIN" in settings)


def test_a_live_calibration_keeps_to_the_budget(updraft, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "prompts.txt").write_text("\n".join(f"What is {i}?" for i in range(100)))
    call = ["calibrate", "--live", "100", "--prompts", "prompts.txt", *NOWHERE]
    prices = {"UPDRAFT_PRICES_CLOUD_INPUT": "0.5", "UPDRAFT_PRICES_CLOUD_OUTPUT": "1.5"}
    done = updraft(*call, env={"UPDRAFT_LOCAL": "pocket", "UPDRAFT_BUDGET_USD": "0", **prices})
    assert done.returncode == 1
    assert "error: No prompt was answered by both tiers: prompts.txt:1: budget spent" in " ".join(done.stderr.split())
    ledger = Ledger(tmp_path / "home" / "ledger.sqlite3")
    assert [row.status for row in ledger.rows(limit=1000)] == [429] * 100
    ledger.close()


def test_nothing_is_paid_for_what_cannot_be_fitted(updraft, tmp_path: Path) -> None:
    (tmp_path / "hidden" / "scipy").mkdir(parents=True)
    (tmp_path / "hidden" / "scipy" / "__init__.py").write_text("raise ImportError('not here')")
    (tmp_path / "prompts.txt").write_text("\n".join(f"What is {i}?" for i in range(100)))
    path = f"{tmp_path / 'hidden'}:{Path(__file__).parents[3] / '.typing'}"
    call = ["calibrate", "--live", "100", "--prompts", "prompts.txt", *NOWHERE]
    done = updraft(*call, env={"UPDRAFT_LOCAL": "pocket", "PYTHONPATH": path})
    assert done.returncode == 1
    assert done.stderr.strip() == "error: scipy is not installed: pip install '.[calibrate]' in a clone of Updraft."


def test_a_model_server_as_the_local_tier(updraft, oracle: str, tmp_path: Path) -> None:
    """Its log-probabilities are signals. The policy is for the model that the server tells of, and for no other."""
    pytest.importorskip("llama_cpp")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": question.prompt}) for question in QUESTIONS[1:102]))
    app = daemon_app(Router(RouterConfig(local="pocket")))
    with serving(app, lifespan=True) as url:
        served = {"UPDRAFT_LOCAL_MODEL": "pocket-small"}
        pair = ["--local", url, "--cloud-url", oracle, "--cloud-model", "oracle"]
        call = ["calibrate", "--live", "101", "--prompts", str(prompts), *pair, "--cloud-share", "0.5"]
        done = updraft(*call, env=served)
        assert done.returncode == 0, done.stderr
        card = Policy.load(tmp_path / "home" / "policies" / "pocket-small--oracle").card
        assert card.local_model is not None and card.local_model.quantization.startswith("served by ")
        assert "signals" in card.blocks["cascade"] and "answer_hidden" not in card.blocks["cascade"]
        done = updraft("ask", QUESTIONS[1].prompt, "--json", *pair, env=served)
        assert json.loads(done.stdout)["updraft"]["reason"].startswith("P(gain)"), done.stderr
    done = updraft("ask", QUESTIONS[1].prompt, "--json", "--local", "pocket", *pair[2:])
    assert "but here it runs as" in done.stderr, "a file of the same name is another model"


def test_a_server_without_logprobs_cannot_be_calibrated(in_process, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("\n".join(f"What is {number} + 1?" for number in range(100)))
    with running_provider() as server:
        server.says({"data": [{"id": "small"}]})
        server.says({"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]})
        call = ["calibrate", "--live", "100", "--prompts", "many.txt", "--local", server.url]
        done = in_process(*call, "--cloud-url", server.url, "--cloud-model", "big")
        assert done.returncode == 2
        assert "gives no log-probabilities for small" in done.stderr
        assert len(server.asked) == 2, "the cloud is not asked"
