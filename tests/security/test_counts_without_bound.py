"""Counts of a request are bounded: a huge `n`, `best_of` or list costs the sender an error, and the node nothing."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

HUGE = 10**9


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"n": HUGE}),
        ("chat/completions", {"n": 2**63}),
        ("chat/completions", {"n": -1}),
        ("chat/completions", {"max_tokens": 10**30}),
        ("chat/completions", {"top_logprobs": HUGE, "logprobs": True}),
        ("chat/completions", {"stop": ["x"] * 10_000}),
        ("chat/completions", {"logit_bias": {str(number): 1 for number in range(100_000)}}),
        ("completions", {"n": HUGE, "best_of": HUGE}),
        ("completions", {"best_of": HUGE}),
        ("completions", {"prompt": ["x"] * 100_000}),
        ("embeddings", {"input": ["x"] * 100_000}),
    ],
)
def test_a_huge_count_is_refused_at_once(gateway: Any, path: str, fields: dict[str, Any]) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}]} if path.startswith("chat") else {"prompt": "hi"}
    given = {"input": "hi"} if path == "embeddings" else given
    started = time.monotonic()
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": "echo", **given, **fields}, headers=gateway.headers)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 5_000
    assert time.monotonic() - started < 30
    assert gateway.chat() == 200
