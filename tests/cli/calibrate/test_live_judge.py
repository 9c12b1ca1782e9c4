"""`calibrate --live` with a judge over real sockets: killed in the middle, resumed, within a budget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest
from updraft.classifier.policy.policy import Policy
from updraft.cli.calibrate.saved_answers import AnsweredPair
from updraft.protocol.safety.system import KILL
from waiting import wait_for

N = 110
THINGS = ("river", "table", "cloud", "lamp", "music", "stone", "paper", "garden", "window", "bread")


def answer_of(prompt: str) -> str:
    """A few words for some prompts, prose for most."""
    number = int(re.findall(r"\d+", prompt)[0])
    if number % 10 == 0:
        return "Nobody knows."
    return f"Once there was a {THINGS[number % 10]}, and many people came from far away to look at it, day after day."


class Server:
    """A cloud, and a judge at the same address, that count what they are asked."""

    def __init__(self) -> None:
        self.cloud: list[str] = []
        self.judged = 0
        self.answers_left = 10**6  # of the cloud, before it falls silent until it may `go_on`
        self.go_on = Event()
        self.broken = False
        self.lock = Lock()

    def reply(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if body["model"] == "judge":
                self.judged += 1
                if key != "Bearer of-the-judge":
                    return 401, {"error": {"message": "a wrong key", "type": "x", "code": "invalid_api_key"}}
                if self.broken:
                    return 500, {"error": {"message": "out of order", "type": "x", "code": "x"}}
                return 200, completion(self.verdict(body["messages"][-1]["content"]))
            prompt = body["messages"][-1]["content"]
            self.cloud.append(prompt)
            self.answers_left -= 1
            is_silent = self.answers_left < 0
        if is_silent:
            self.go_on.wait(60)
        return 200, completion(answer_of(prompt))

    def verdict(self, text: str) -> str:
        """The tale that begins with "Once" is the better one, but of every third prompt all are the same."""
        number = int(re.findall(r"Tale (\d+)", text)[0])
        if number % 3 == 0:
            return "[[C]]"
        return "[[A]]" if "Once there" in text.partition(" answer B")[0].partition(" answer A")[2] else "[[B]]"


def completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    pytest.importorskip("llama_cpp")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, reply = state.reply(body, self.headers.get("authorization"))
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield state, f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()
        thread.join()


PRICES = {
    "UPDRAFT_PRICES_CLOUD_INPUT": "1",
    "UPDRAFT_PRICES_CLOUD_OUTPUT": "10",
    "JUDGE_KEY": "of-the-judge",
    "UPDRAFT_LOCAL_MAX_TOKENS": "100",
}


def call(url: str, tmp_path: Path, *more: str) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Tale {i}: tell me of the {THINGS[i % 10]}."} for i in range(1, N + 1)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    pair = ["--local", "pocket", "--cloud-url", url, "--cloud-model", "big"]
    judge = ["--judge", "judge", "--judge-url", url, "--judge-api-key-env", "JUDGE_KEY"]
    return ["calibrate", "--live", str(N), "--prompts", str(prompts), *pair, *judge, *more]


def kept_in(tmp_path: Path) -> list[AnsweredPair]:
    import msgspec

    files = list((tmp_path / "home" / "calibrations").glob("*.jsonl"))
    lines = [line for path in files for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [pair for line in lines if (pair := msgspec.json.decode(line, type=AnsweredPair)).key]


def test_killed_and_resumed(
    updraft: Any, environment: dict[str, str], server: tuple[Server, str], tmp_path: Path
) -> None:
    state, url = server
    state.answers_left = 30
    command = [sys.executable, "-m", "updraft", *call(url, tmp_path)]
    running = subprocess.Popen(
        command, env={**environment, **PRICES}, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: len(kept_in(tmp_path)) >= 20)
    running.send_signal(KILL)
    running.wait()
    before = len(kept_in(tmp_path))
    assert 20 <= before < N
    state.answers_left = 10**6
    state.go_on.set()
    sent = len(state.cloud)
    done = updraft(*call(url, tmp_path, "--json", "out.json"), env=PRICES)
    assert done.returncode == 0, done.stderr
    assert f"{before} of {N} prompts were answered before and are not asked again." in " ".join(done.stderr.split())
    assert len(state.cloud) - sent == N - before
    assert not kept_in(tmp_path), "the policy is made: nothing is kept"
    figures = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert figures["rows"] == N
    assert figures["grading.judge"] + figures["grading.agreement"] == N
    assert figures["judge.judged"] == figures["grading.judge"] > 10
    assert figures["grading.agreement"] >= N // 10, "short answers need no judge"
    assert 0 < figures["gain_rate"] < 1, "a tie is as good as a win"
    policy = Policy.load(tmp_path / "home" / "policies" / "pocket-small--big")
    assert "by the judge judge (both orders of each pair" in policy.card.grading
    printed = " ".join(done.stdout.split())
    assert "The judge judge compared" in printed
    assert "Grading by shared words gives the judge's verdict on" in printed
    assert re.search(r"cost \$0\.\d{4}", printed)


def test_a_judge_that_is_down_or_refuses(updraft: Any, server: tuple[Server, str], tmp_path: Path) -> None:
    state, url = server
    wrong = updraft(*call(url, tmp_path), env={**PRICES, "JUDGE_KEY": "stolen-key"})
    assert wrong.returncode == 1
    assert "the judge judge: " in wrong.stderr
    assert "a wrong key" in wrong.stderr
    assert "run the same command to resume" in " ".join(wrong.stderr.split())
    state.broken = True
    down = updraft(*call(url, tmp_path), env=PRICES)
    assert down.returncode == 2
    assert "A policy needs at least 100 graded prompts" in down.stderr
    sent = len(state.cloud)
    assert len(kept_in(tmp_path)) == N == sent, "both answers are there: only the verdicts are missing"
    state.broken = False
    (tmp_path / "judge.key").write_text("of-the-judge\n")
    from_file = {"--judge-api-key-env": "--judge-api-key-file", "JUDGE_KEY": str(tmp_path / "judge.key")}
    again = updraft(*(from_file.get(word, word) for word in call(url, tmp_path)), env=PRICES)
    assert again.returncode == 0, again.stderr
    assert len(state.cloud) == sent


def test_a_budget_for_cloud_and_judge(
    updraft: Any, in_process: Any, server: tuple[Server, str], tmp_path: Path
) -> None:
    """An answer costs $0.0003 and a verdict as much; what may be needed for one more prompt is near $0.05."""
    state, url = server
    done = updraft(*call(url, tmp_path, "--budget", "0.1"), env=PRICES)
    assert done.returncode == 2
    printed = " ".join(done.stderr.split())
    assert "the budget of $0.1" in printed
    assert "Raise --budget and run the same command to resume" in printed
    assert (len(state.cloud) + state.judged) * 0.0003 <= 0.1
    assert 0 < len(kept_in(tmp_path)) < N
    unpriced = in_process(*call(url, tmp_path, "--budget", "1"), env={"JUDGE_KEY": "of-the-judge"})
    assert unpriced.returncode == 2
    both = in_process(*call(url, tmp_path, "--judge-api-key-file", "judge.key"), env=PRICES)
    assert "Give --judge-api-key-env or --judge-api-key-file, not both." in both.stderr
    assert "--budget needs the price of big" in unpriced.stderr
