"""Everything a client may ask of a real node, through the real openai client: whole, streamed, several at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from exposition import parse
from tiny_model import CONTEXT
from waiting import wait_for


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module", params=[0, 1], ids=["plain", "with-draft"])
def url(request: pytest.FixtureRequest, nodes: list[str]) -> str:
    return nodes[request.param]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens_of(url: str, text: str) -> list[int]:
    return httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]


# Embeddings


def test_embeddings_match_transformers(client: openai.OpenAI, url: str, reference: Any) -> None:
    texts = ["x", "A question of more than one block of tokens, all in one text.", "Grüße, 世界 🙂" * 8]
    ids = [tokens_of(url, text) for text in texts]
    with torch.inference_mode():
        hidden = [reference.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0] for tokens in ids]
    expected = torch.stack([torch.nn.functional.normalize(rows.mean(0), dim=0) for rows in hidden])
    bodies: list[Any] = [{"input": texts}, {"input": ids}, {"input": texts, "encoding_format": None}]
    for request in bodies:
        reply = client.embeddings.create(model="tiny", **request)
        assert [item.index for item in reply.data] == [0, 1, 2]
        torch.testing.assert_close(torch.tensor([item.embedding for item in reply.data]), expected, atol=1e-4, rtol=0)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    for one in (texts[1], ids[1]):
        reply = client.embeddings.create(model="tiny", input=one)
        torch.testing.assert_close(torch.tensor(reply.data[0].embedding), expected[1], atol=1e-4, rtol=0)


def test_many_inputs_keep_their_order(client: openai.OpenAI) -> None:
    texts = [f"{'word ' * (i % 7)}{i}" for i in range(60)]
    together = client.embeddings.create(model="tiny", input=texts)
    for index in (0, 31, 59):
        alone = client.embeddings.create(model="tiny", input=texts[index]).data[0].embedding
        torch.testing.assert_close(torch.tensor(together.data[index].embedding), torch.tensor(alone), atol=1e-4, rtol=0)


def test_leaving_aborts_embeddings(nodes: list[str]) -> None:
    url = nodes[0]
    aborted = sample(url, "updraft_engine_aborted_requests_total")
    while sample(url, "updraft_engine_aborted_requests_total") == aborted:  # a busy machine may not have begun
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/embeddings", json={"model": "tiny", "input": ["x" * CONTEXT] * 2048}, timeout=1)
        wait_for(lambda: sample(url, "updraft_engine_running") + sample(url, "updraft_engine_waiting") == 0)
    assert sample(url, "updraft_engine_kv_blocks_used") == 0


# Several prompts, several answers


@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts_are_numbered_through(client: openai.OpenAI, url: str, n: int) -> None:
    texts = ["first", "second one", "third"]
    request: Any = {"model": "tiny", "temperature": 0, "max_tokens": 5, "n": n}
    alone = [client.completions.create(prompt=text, **request) for text in texts]
    expected = [choice.text for answer in alone for choice in answer.choices]
    prompts: list[Any] = [texts, [tokens_of(url, text) for text in texts]]
    for prompt in prompts:
        together = client.completions.create(prompt=prompt, **request)
        assert [choice.index for choice in together.choices] == list(range(3 * n))
        assert [choice.text for choice in together.choices] == expected
        assert together.usage and together.usage.completion_tokens == 15 * n
        assert together.usage.prompt_tokens == sum(map(len, texts))
    assert client.completions.create(prompt=prompts[1][1], **request).choices[0].text == expected[n]

    chunks = list(
        client.completions.create(prompt=texts, stream=True, stream_options={"include_usage": True}, **request)
    )
    streamed = [""] * (3 * n)
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected
    streamed_usage = chunks[-1].usage
    assert streamed_usage is not None  # how much was drafted may differ: it follows from measured times
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(streamed_usage, name) == getattr(together.usage, name)


def test_a_bad_prompt_takes_the_others_along(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="Token ids") as caught:
        client.completions.create(model="tiny", prompt=[[1, 2], [10**6]], max_tokens=200)
    assert caught.value.param == "prompt"
    wait_for(lambda: sample(url, "updraft_engine_running") == 0)


def test_legacy_logprobs_always_hold_the_chosen_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=8, logprobs=1, temperature=2, seed=3)
    scores = answer.choices[0].logprobs
    assert scores and scores.tokens and scores.token_logprobs and scores.top_logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 8
    for token, logprob, alternatives in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert alternatives[token] == logprob
        assert len(alternatives) <= 2


# Usage


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_usage_in_streams(client: openai.OpenAI, kind: str, n: int) -> None:
    request: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0, "n": n}
    if kind == "chat":
        ask: Any = client.chat.completions.create
        request["messages"] = say("How is usage counted?")
        request["prediction"] = {"type": "content", "content": "not this"}
    else:
        ask, request["prompt"] = client.completions.create, "How is usage counted?"
    whole = ask(**request)
    assert whole.usage.completion_tokens == 6 * n
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6 * n
    if kind == "chat":
        details = whole.usage.completion_tokens_details
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == len("not this") * n

    chunks = [chunk.to_dict() for chunk in ask(**request, stream=True, stream_options={"include_usage": True})]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6 * n
    assert chunks[-1]["usage"]["prompt_tokens"] == whole.usage.prompt_tokens
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all("usage" not in chunk.to_dict() for chunk in ask(**request, stream=True, **options))


def test_cached_tokens_are_reported_however_the_answer_ends(client: openai.OpenAI) -> None:
    text = "A prompt of more than thirty-two bytes, in blocks of sixteen."

    def ask(**options: Any) -> Any:
        return client.completions.create(model="tiny", prompt=text, temperature=0, max_tokens=12, **options)

    first = ask(extra_body={"cache_salt": str(client.base_url)})
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = len(text) - 1 - (len(text) - 1) % 16
    stop = first.choices[0].text[5]
    for options in ({}, {"stop": stop}, {"n": 2}):
        again = ask(extra_body={"cache_salt": str(client.base_url)}, **options)
        assert again.usage.prompt_tokens_details.cached_tokens == cached, options
    running = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [
        chunk.usage
        for chunk in ask(extra_body={"cache_salt": str(client.base_url)}, stream=True, stream_options=running)
    ]
    assert len(chunks) > 3 and {usage.prompt_tokens_details.cached_tokens for usage in chunks} == {cached}


# Continuing a message


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_continued_where_it_stands(client: openai.OpenAI, url: str, stream: bool) -> None:
    """Letters only, so that every cut is one between characters."""
    letters = {str(token): 50 for token in tokens_of(url, "abcdefghijklmnopqrstuvwxyz")}
    extra = {"repetition_penalty": 1.5}
    request: Any = {"model": "tiny", "temperature": 0, "logit_bias": letters}
    question = say("Continue")
    whole = client.chat.completions.create(messages=question, max_tokens=24, extra_body=extra, **request)
    text = whole.choices[0].message.content
    assert text and len(text) == 24
    assert len(set(text)) > 5
    for cut in (1, 10, 23):
        answer = client.chat.completions.create(
            messages=[*question, {"role": "assistant", "content": text[:cut]}],
            max_tokens=24 - cut,
            stream=stream,
            extra_body={**extra, "continue_final_message": True, "add_generation_prompt": False},
            **request,
        )
        if stream:
            rest = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            rest = answer.choices[0].message.content
        assert rest == text[cut:]


# Limits and errors


LONG = "x" * (CONTEXT + 1)
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": say("hi"), "max_tokens": 2},
    TEXT: {"model": "tiny", "prompt": "hi", "max_tokens": 2},
    EMBED: {"model": "tiny", "input": "hi"},
}
BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    # the model's limits
    (CHAT, {"messages": say(LONG)}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"max_tokens": CONTEXT}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"max_completion_tokens": CONTEXT}, 400, "messages", "context_length_exceeded"),
    (TEXT, {"prompt": LONG}, 400, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": ["short", LONG]}, 400, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": "hi", "max_tokens": CONTEXT}, 400, "prompt", "context_length_exceeded"),
    (EMBED, {"input": LONG}, 400, "input", "context_length_exceeded"),
    (EMBED, {"input": "x" * 1_000_000}, 400, "input", "context_length_exceeded"),
    (EMBED, {"input": ["short", LONG]}, 400, "input", "context_length_exceeded"),
    # tokens
    (TEXT, {"prompt": [5, 10**6]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [-1]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [2**70]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt[0]", "invalid_value"),
    (TEXT, {"prompt": [1, "two"]}, 400, "prompt", "invalid_value"),
    (EMBED, {"input": [[5], [10**6]]}, 400, "input", "invalid_value"),
    (CHAT, {"logit_bias": {"1000000": 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"stop_token_ids": [10**6]}, 400, "stop_token_ids", "invalid_value"),
    # nothing to work on
    (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    (TEXT, {"prompt": ""}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": []}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": ["a", ""]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": ["a"] * 129}, 400, "prompt", "invalid_value"),
    (EMBED, {"input": []}, 400, "input", "invalid_value"),
    (EMBED, {"input": [[]]}, 400, "input", "invalid_value"),
    (EMBED, {"input": ["a"] * 2049}, 400, "input", "invalid_value"),
    # counts
    (CHAT, {"n": 0}, 400, "n", "invalid_value"),
    (CHAT, {"n": 17}, 400, "n", "invalid_value"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    (TEXT, {"logprobs": 21}, 400, "logprobs", "invalid_value"),
    (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": [""]}, 400, "stop", "invalid_value"),
    # types
    (CHAT, {"messages": "hi"}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages[0].role", "invalid_value"),
    (CHAT, {"temperature": "hot"}, 400, "temperature", "invalid_value"),
    (CHAT, {"max_tokens": 1.5}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"seed": 2**63}, 400, "seed", "invalid_value"),
    (CHAT, {"stream": "yes"}, 400, "stream", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
    (EMBED, {"encoding_format": "int8"}, 400, "encoding_format", "invalid_value"),
    # not here
    (CHAT, {"model": "gpt-9"}, 404, "model", "model_not_found"),
    (TEXT, {"model": "gpt-9"}, 404, "model", "model_not_found"),
    (EMBED, {"model": "gpt-9"}, 404, "model", "model_not_found"),
    (EMBED, {"dimensions": 8}, 400, "dimensions", "unsupported_parameter"),
    (TEXT, {"suffix": "end"}, 400, "suffix", "unsupported_parameter"),
    (EMBED, {"pooling": "max"}, 400, "pooling", "invalid_value"),
]
KINDS = {400: openai.BadRequestError, 404: openai.NotFoundError, 413: openai.APIStatusError}


@pytest.mark.parametrize(
    ("path", "change", "status", "param", "code"), BAD, ids=lambda value: str(value)[:40].replace(LONG[:20], "long")
)
def test_refusals_have_openais_error_shape(
    client: openai.OpenAI, path: str, change: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    with pytest.raises(KINDS[status]) as caught:
        client.post(path.removeprefix("/v1"), body={**GOOD[path], **change}, cast_to=httpx.Response)
    assert caught.value.status_code == status
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", [CHAT, TEXT, EMBED])
def test_bodies_methods_and_paths(url: str, path: str) -> None:
    cases: list[tuple[str, str, bytes, int, str]] = [
        ("POST", path, b"", 400, "invalid_json"),
        ("POST", path, b"{", 400, "invalid_json"),
        ("POST", path, b"\xff\xfe", 400, "invalid_json"),
        ("POST", path, b"[" * 100_000, 400, "invalid_value"),
        ("POST", path, b"[]", 400, "invalid_value"),
        ("POST", path, b"{}", 400, "invalid_value"),
        ("POST", path, b" " * (8 * 2**20 + 1), 413, "request_too_large"),
        ("GET", path, b"", 405, "method_not_allowed"),
        ("POST", path + "/", b"{}", 404, "not_found"),
        ("POST", "/v2" + path, b"{}", 404, "not_found"),
    ]
    with httpx.Client(base_url=url, timeout=60) as http:
        for method, route, body, status, code in cases:
            response = http.request(method, route, content=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), (method, route, body[:9])
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert http.post(path, json=GOOD[path]).status_code == 200


# Models, tokens, metrics


def test_models(client: openai.OpenAI) -> None:
    [card] = client.models.list()
    assert (card.id, card.owned_by, card.object) == ("tiny", "updraft", "model")
    assert time.time() - 600 < card.created <= time.time()
    assert card.model_extra == {"max_model_len": CONTEXT}
    assert client.models.retrieve("tiny") == card


def test_token_strings(url: str) -> None:
    answer = httpx.post(f"{url}/tokenize", json={"messages": say("hü"), "return_token_strs": True}).json()
    assert answer["token_strs"][:2] == ["<|im_start|>", "u"]
    assert "".join(answer["token_strs"]).count("\ufffd") == 2, "the halves of a character"
    assert httpx.post(f"{url}/tokenize", json={"prompt": "hü"}).json()["token_strs"] is None


def test_metrics_tell_what_happened(client: openai.OpenAI, url: str) -> None:
    prompt = "The same prompt, asked twice, is half in the cache."
    before = parse(httpx.get(f"{url}/metrics").text)
    for _ in range(2):
        client.completions.create(model="tiny", prompt=prompt, max_tokens=5)
    client.embeddings.create(model="tiny", input=prompt)
    after = parse(httpx.get(f"{url}/metrics").text)

    def grown(name: str, labels: str = "") -> float:
        family = name.removesuffix("_count")
        return after[family].samples[name, labels] - before[family].samples.get((name, labels), 0)

    assert grown("updraft_answers_total", 'finish_reason="length"') == 2
    assert grown("updraft_engine_finished_requests_total") == 3
    assert grown("updraft_engine_generated_tokens_total") == 10
    assert grown("updraft_engine_prompt_tokens_total") == 3 * len(prompt)
    assert grown("updraft_engine_prefix_query_tokens_total") == 2 * len(prompt)
    assert grown("updraft_engine_prefix_hit_tokens_total") == 48
    assert grown("updraft_engine_queue_seconds_count") == 3
    assert grown("updraft_engine_step_seconds_count") == grown("updraft_engine_steps_total") > 2
    for name in ("ttft", "tpot", "e2e"):
        assert grown(f"updraft_{name}_seconds_count") == 2
    now = {name: family.samples.get((name, ""), 0) for name, family in after.items()}
    assert now["updraft_engine_kv_usage_ratio"] == now["updraft_engine_running"] == 0
    for ratio, part, whole in (
        ("prefix_hit", "prefix_hit_tokens", "prefix_query_tokens"),
        ("draft_acceptance", "draft_accepted", "draft_proposed"),
    ):
        total = now[f"updraft_engine_{whole}_total"]
        expected = now[f"updraft_engine_{part}_total"] / total if total else 0
        assert now[f"updraft_engine_{ratio}_ratio"] == pytest.approx(expected)


def sample(url: str, name: str) -> float:
    return parse(httpx.get(f"{url}/metrics").text)[name].samples[name, ""]
