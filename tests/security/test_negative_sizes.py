"""Negative and huge numbers are refused before any native code sees them, and the node serves on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": [2**31]}),
    ("/v1/completions", {"prompt": [-(2**63)]}),
    ("/v1/completions", {"prompt": [[1], [-5]]}),
    ("/v1/completions", {"max_tokens": -1}),
    ("/v1/completions", {"max_tokens": -(2**31)}),
    ("/v1/completions", {"top_k": -5}),
    ("/v1/completions", {"min_tokens": -1}),
    ("/v1/completions", {"logprobs": -1}),
    ("/v1/completions", {"prompt_logprobs": -5}),
    ("/v1/completions", {"n": -1}),
    ("/v1/completions", {"best_of": -1}),
    ("/v1/completions", {"logit_bias": {"-1": 1}}),
    ("/v1/completions", {"logit_bias": {"4294967297": 1}}),
    ("/v1/completions", {"stop_token_ids": [-1]}),
    ("/v1/completions", {"truncate_prompt_tokens": -7}),
    ("/v1/completions", {"repetition_penalty": -1}),
    ("/v1/completions", {"temperature": -1}),
    ("/v1/embeddings", {"input": [[-1]]}),
    ("/v1/embeddings", {"input": "hi", "dimensions": -1}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [2**40]}),
]


@pytest.mark.parametrize(("path", "fields"), BAD, ids=str)
def test_a_number_that_cannot_be_is_refused(node: Any, path: str, fields: dict[str, Any]) -> None:
    given = {"model": "tiny", **({"prompt": "hi", "max_tokens": 1} if path.endswith("/completions") else {})}
    answer = httpx.post(node.url + path, json={**given, **fields}, headers=node.headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert node.complete().status_code == 200
