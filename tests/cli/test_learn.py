"""`updraft learn` and `updraft feedback` after real use: a shadow over the real local model, a cloud over sockets."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import updraft as package
from typer.testing import CliRunner
from updraft.classifier.online.experience import ExperienceStore, Observation, pack
from updraft.classifier.policy.policy import Policy
from updraft.cli.main import app
from updraft.router.config import RouterConfig
from updraft_oracle import QUESTIONS, oracle

__all__ = ["oracle"]


EARLIER = [{"role": "user", "content": "Please help me."}, {"role": "assistant", "content": "Gladly."}]


def test_a_shadow_teaches_a_policy(updraft, oracle: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    file = tmp_path / "home" / "experience.sqlite3"
    config = RouterConfig(
        local="pocket", cloud_url=oracle, cloud_model="oracle", experience=file, shadow=True, experience_text=True
    )
    with package.OpenAI(config=config) as client:
        for i, question in enumerate(QUESTIONS[1:111]):
            messages = [*(EARLIER if i % 2 else []), {"role": "user", "content": question.prompt}]
            completion = client.chat.completions.create(model="auto", messages=messages)
            assert completion.choices[0].message.content == question.answer
            info = completion.model_extra["updraft"]
            assert info["reason"].startswith("shadow: ")
    pair = ["--local", "pocket", "--cloud-model", "oracle"]
    learned = updraft("learn", *pair, "--quality", "0.8", "--json", "out.json")
    assert learned.returncode == 0, learned.stderr
    assert "graded by agreement with the cloud in live use" in learned.stdout
    policy = Policy.load(tmp_path / "home" / "policies" / "pocket-small--oracle")
    assert policy.card.rows == 110
    assert 0.05 < policy.card.gain_rate < 0.95
    assert json.loads((tmp_path / "out.json").read_text())["metrics"]["rows"] == 110
    replayed = updraft("calibrate", "--from-log", str(file), *pair, "--quality", "0.8", "--out", "replayed")
    assert replayed.returncode == 0, replayed.stderr
    assert "110 prompts, graded by agreement" in replayed.stdout
    again = Policy.load(tmp_path / "replayed")
    assert again.card.data[0].name == "experience.sqlite3"
    assert again.card.gain_rate == pytest.approx(policy.card.gain_rate), "the same grades"
    assert again.reads_answers
    assert again.calibrated_on.turns == 3, "conversations were replayed as such"
    assert "conversation" in again.card.blocks["cascade"]
    noted = updraft("feedback", info["request_id"], "down")
    assert (noted.returncode, noted.stdout) == (0, f"Recorded feedback for {info['request_id']}: down.\n")
    unknown = updraft("feedback", "chatcmpl-0", "up")
    assert unknown.returncode == 1
    assert "Request 'chatcmpl-0' is not in the ledger" in unknown.stderr


def test_a_log_without_texts_makes_no_policy(in_process, tmp_path: Path) -> None:
    file = tmp_path / "experience.sqlite3"
    experience = ExperienceStore(file)
    features = pack(({"wording": np.ones(3, np.float32)}, np.ones(5, np.float32)))
    for number in range(120):
        measured = (0.5, 1.0, 1.0, 0.0, 1.0, None, 20.0, 10.0, "cloud")
        experience.add(Observation(f"r{number}", "pocket-small with big", 1.0, *measured, features, sampled=1))
    experience.close()
    call = ["calibrate", "--from-log", str(file), "--local", "pocket", "--cloud-model"]
    done = in_process(*call, "big")
    assert done.returncode == 2
    printed = " ".join(done.stderr.split())
    assert "Of 120 judged answers, 120 were sampled at random and graded; 0 of these have texts" in printed
    assert "experience_text = true" in printed
    other = in_process(*call, "another")
    assert (
        "has no requests of pocket-small with another. It holds requests of pocket-small with big (120)."
        in other.stderr
    )


def test_nothing_was_seen(in_process) -> None:
    done = in_process("learn")
    assert done.returncode == 2
    assert "set experience = 'features', exploration or shadow" in " ".join(done.stderr.split())


def test_damaged_answers_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    fitted: list[str] = []

    def fit(rows: Sequence[Observation], *_: object) -> Policy:
        fitted.extend(row.id for row in rows)
        raise InterruptedError

    monkeypatch.setattr("updraft.classifier.online.refit.learn", fit)
    file = tmp_path / "experience.sqlite3"
    features = pack(({"wording": np.ones(3, np.float32)}, np.ones(5, np.float32)))
    experience = ExperienceStore(file)
    for name in ("whole", "cut", "none", "flipped"):
        measured = (0.5, 1.0, 1.0, 0.0, 1.0, None, 20.0, 10.0, "cloud")
        experience.add(Observation(name, "pocket-small with pocket-large", 1.0, *measured, features))
    experience.close()
    with closing(sqlite3.connect(file)) as damaged, damaged:
        damaged.execute("UPDATE observations SET features = substr(features, 1, 10) WHERE id = 'cut'")
        damaged.execute("UPDATE observations SET features = NULL WHERE id = 'none'")
        flipped = features[:-1] + bytes([features[-1] ^ 1])
        damaged.execute("UPDATE observations SET features = ? WHERE id = 'flipped'", (flipped,))
    done = CliRunner().invoke(app, ["learn", "--local", "pocket", "--cloud-model", "pocket-large"])
    assert isinstance(done.exception, InterruptedError)
    assert done.stderr == "3 of 4 judged answers are damaged and were skipped.\n"
    assert fitted == ["whole"]
