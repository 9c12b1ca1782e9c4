"""`updraft calibrate`: from graded prompts, or both tiers live, to a policy that the router uses by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from updraft.bench.questions import pocket_questions
from updraft.classifier.graded import read_graded
from updraft.classifier.text_policy import TextPolicy

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "routing" / "routellm_gsm8k.csv.gz"
QUESTIONS = pocket_questions(160, seed=5)


@pytest.fixture(scope="module")
def oracle() -> Iterator[str]:
    """A cloud that knows the answers to the tasks, at 20 tokens read and 10 written each; one it never answers."""
    answers = {question.prompt: question.answer for question in QUESTIONS[1:]}

    class Oracle(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = answers.get(request["messages"][-1]["content"])
            message = {"role": "assistant", "content": answer}
            body: dict[str, Any] = {
                "id": "c1", "object": "chat.completion", "created": 1, "model": "oracle",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30},
            }  # fmt: skip
            data = json.dumps(body if answer else {"error": {"message": "out of order", "type": "x"}}).encode()
            self.send_response(200 if answer else 400)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Oracle) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_both_tiers_live_and_then_in_use(updraft, oracle: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": question.prompt}) for question in QUESTIONS))
    pair = ["--cloud", oracle, "--cloud-model", "oracle"]
    call = ["calibrate", "--live", str(len(QUESTIONS)), "--prompts", str(prompts), *pair]
    done = updraft(*call, "--cloud-share", "0.5", "--save", "kept.jsonl", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "With 90% confidence, on requests like these: at most 50.0% go to the cloud." in done.stdout
    assert "159 prompts, graded by agreement" in done.stdout
    assert "1 of 160 prompts got no row" in done.stderr
    policy = TextPolicy.load(tmp_path / "home" / "policies" / "pocket-small--oracle")
    assert policy.card.models == {"local": "pocket-small", "cloud": "oracle"}
    assert policy.card.signals and not policy.card.estimated_tokens
    assert policy.calibration.written.mean() == 10
    figures = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert 0.05 < figures["gain_rate"] < 0.95
    assert 0 < figures["cloud_share"] < 0.5
    rows = read_graded(tmp_path / "kept.jsonl")
    graded = [question.grade(row.answer or "") for question, row in zip(QUESTIONS[1:], rows, strict=True)]
    agreed = sum(right == (row.weak == 1) for right, row in zip(graded, rows, strict=True))
    assert agreed >= 0.9 * len(rows), "agreement with the right answer is nearly being right"
    asked = updraft("ask", QUESTIONS[1].prompt, "--json", *pair)
    assert json.loads(asked.stdout)["updraft"]["reason"].startswith("P(gain)"), asked.stdout


def test_a_graded_file(updraft, tmp_path: Path) -> None:
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not there")
    rows = read_graded(GSM8K)[:300]
    data = tmp_path / "graded.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": r.prompt, "mixtral": r.weak, "gpt4": r.strong}) for r in rows))
    call = ["calibrate", "--data", str(data), "--weak", "mixtral", "--strong", "gpt4", "--cloud-model", "gpt-4"]
    done = updraft(*call, "--quality", "0.9", "--out", "policy")
    assert done.returncode == 0, done.stderr
    assert "Floor: to lose at most" in done.stdout
    assert "(mu - alpha) / (1 - alpha)" in done.stdout
    assert "stay local although only the cloud is right" in done.stdout
    card = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert card["models"] == {"local": "pocket-small", "cloud": "gpt-4"}
    assert card["data"][0]["name"] == "graded.jsonl"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Give --data FILE or --live N"),
        (["--live", "5"], "belong together"),
        (["--data", "few.csv", "--save", "x"], "--save keeps what --live graded"),
        (["--data", "few.csv", "--quality", "0.9", "--cost", "1"], "exclude each other"),
        (["--data", "few.csv", "--local", "none"], "no local model to calibrate"),
        (["--data", "few.csv"], "at least 100 graded prompts"),
        (["--live", "5", "--prompts", "two.txt"], "holds 2 prompts, --live asks for 5"),
    ],
)
def test_calls_that_make_no_sense(updraft, tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "few.csv").write_text("prompt,weak,strong\nWhat?,0,1\nHow?,1,1\n")
    (tmp_path / "two.txt").write_text("What?\n\nHow?\n")
    done = updraft("calibrate", *flags)
    assert done.returncode == 2
    assert message in done.stderr
