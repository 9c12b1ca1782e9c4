"""The node as users start it: a model folder, a draft model, the real engine, the real client."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_model import CONTEXT, write_model
from updraft.text.tokenizer import Tokenizer


def ask(url: str, text: str, **options: Any) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        messages: list[Any] = [{"role": "user", "content": text}]
        request = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **options}
        answer = client.chat.completions.create(**request)
        return list(answer) if options.get("stream") else answer


def test_streams_equal_whole_answers_with_and_without_drafts(nodes: list[str], folder: Path) -> None:
    plain = ask(nodes[0], "Hello", logprobs=True, top_logprobs=2)
    text = plain.choices[0].message.content
    scores = plain.choices[0].logprobs.content
    assert len(scores) == plain.usage.completion_tokens
    assert bytes(b for score in scores for b in score.bytes or []).decode("utf-8", "replace") == text
    assert all(score.logprob <= score.top_logprobs[0].logprob <= 0 for score in scores)

    def stream(url: str) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in ask(url, "Hello", stream=True))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert set(pool.map(stream, nodes * 2)) == {text}


def test_a_draft_model_proposes(tmp_path: Path, spawned: Any) -> None:
    """The target is wide enough that drafts pay. On a busy machine, the node learns this from its first steps."""
    target, draft = write_model(tmp_path / "tiny", 0, width=768, layers=4), write_model(tmp_path / "draft", 1)
    start = ("-m", "updraft", "node", "--port", "0", "--model", str(target), "--threads", "1", "--exit-with-parent")
    with spawned(*start, "--draft", str(draft)) as node:
        for _ in range(30):
            assert ask(node.url, "Hello").usage.completion_tokens == 24
            metrics = httpx.get(f"{node.url}/metrics").text
            proposed = re.search(r"^updraft_engine_draft_proposed_total (\d+)", metrics, re.MULTILINE)
            assert proposed is not None
            if int(proposed[1]) > 0:
                return
    raise AssertionError("the draft model proposed nothing in 30 answers")


def test_own_answer_as_prediction_is_accepted(nodes: list[str], folder: Path) -> None:
    first = ask(nodes[0], "Predict me", logprobs=True)
    raw = bytes(b for score in first.choices[0].logprobs.content for b in score.bytes or [])
    prefix = raw[: valid_prefix(raw)].decode()
    again = ask(nodes[0], "Predict me", prediction={"type": "content", "content": prefix})
    details = again.usage.completion_tokens_details
    assert again.choices[0].message.content == first.choices[0].message.content
    assert details.accepted_prediction_tokens == len(Tokenizer.from_folder(folder).encode(prefix))
    assert details.rejected_prediction_tokens == 0


def test_prompt_that_does_not_fit(nodes: list[str]) -> None:
    for text, limit in (("x" * (CONTEXT + 1), 1), ("x" * 100, CONTEXT)):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(nodes[0], text, max_tokens=limit)
        assert caught.value.code == "context_length_exceeded"
    assert httpx.get(f"{nodes[0]}/health").json()["status"] == "ok"


def valid_prefix(raw: bytes) -> int:
    """Length of the longest start of `raw` that is UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(raw)


def test_cached_prefixes_are_shared_only_under_one_salt_and_tenant(nodes: list[str]) -> None:
    text = "A question of more than sixteen tokens, which is a block."

    def cached(salt: str | None, tenant: str) -> int:
        options = {"extra_body": {"cache_salt": salt}, "extra_headers": {"x-updraft-tenant": tenant}}
        return ask(nodes[0], text, max_tokens=1, **options).usage.prompt_tokens_details.cached_tokens

    assert cached("ours", "a") == 0
    assert cached("ours", "a") > 16
    assert cached("theirs", "a") == cached("ours", "b") == cached(None, "b") == 0
    assert cached("ours", "a") > 16


def test_a_priority_needs_a_server_that_heeds_it(nodes: list[str]) -> None:
    with pytest.raises(openai.BadRequestError, match="--scheduling-policy priority") as caught:
        ask(nodes[0], "Hello", extra_body={"priority": 1})
    assert caught.value.param == "priority"


@pytest.mark.parametrize("options", [{"temperature": 5e-324, "top_p": 1e-300}, {"temperature": 2, "seed": 2**62}])
def test_extreme_sampling_still_answers(nodes: list[str], options: dict[str, Any]) -> None:
    answer = ask(nodes[0], "Hello", extra_body={"min_p": 0.99, "top_k": 2**31 - 1, "typical_p": 1e-9}, **options)
    assert answer.usage.completion_tokens == 24


def test_a_prediction_that_no_context_could_hold_is_refused(nodes: list[str]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(nodes[0], "Hello", prediction={"type": "content", "content": "x" * 1_000_000})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prediction")


def test_an_answer_says_how_it_was_sampled_and_why_it_ended(nodes: list[str]) -> None:
    """The folder says that its model is greedy; whole, streamed, and as text."""
    own = {"temperature": 0.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0, "repetition_penalty": 1.0}
    with openai.OpenAI(base_url=f"{nodes[0]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 1}
        whole = client.chat.completions.create(**fields)
        assert whole.model_extra is not None and whole.model_extra["sampling"] == own
        assert whole.choices[0].finish_reason == "length"
        assert (whole.choices[0].model_extra or {})["stop_reason"] == "default_max_tokens"
        *begun, last = client.chat.completions.create(**fields, stream=True, temperature=0.5, extra_body={"top_k": 5})
        assert (last.model_extra or {})["sampling"] == {**own, "temperature": 0.5, "top_k": 5}
        assert not any("sampling" in (chunk.model_extra or {}) for chunk in begun)
        limited = client.chat.completions.create(**fields, max_tokens=3)
        assert "stop_reason" not in (limited.choices[0].model_extra or {})
        text = client.completions.create(model="tiny", prompt="Hi", max_tokens=3, top_p=0.5)
        assert (text.model_extra or {})["sampling"] == {**own, "top_p": 0.5}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 7}])
def test_answer_continues_after_the_tokens_of_another_node(nodes: list[str], options: dict[str, Any]) -> None:
    """The random model writes broken characters, which no text could carry from one node to another."""
    begun: list[tuple[str, list[int]]] = []
    text, token_ids = "", list[int]()
    for chunk in ask(nodes[0], "Hello", stream=True, extra_body={"return_token_ids": True}, **options):
        text += chunk.choices[0].delta.content or ""
        if new := getattr(chunk.choices[0], "token_ids", None):
            token_ids = token_ids + new
            begun.append((text, token_ids))
    assert "\ufffd" in text
    assert len(begun) > 6
    for said, given in begun[:: len(begun) // 3]:
        body = {"answer_token_ids": given}
        rest = ask(nodes[1], "Hello", extra_body=body, **{**options, "max_tokens": 24 - len(given)})
        assert said + rest.choices[0].message.content == text
        assert rest.usage.completion_tokens == 24 - len(given)


def test_impossible_continuations_are_refused(nodes: list[str]) -> None:
    for options in ({"n": 2}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.BadRequestError, match="answer_token_ids"):
            ask(nodes[0], "Hello", extra_body={"answer_token_ids": [1]}, **options)
    with pytest.raises(openai.BadRequestError, match="Token ids"):
        ask(nodes[0], "Hello", extra_body={"answer_token_ids": [10**6]})
