"""The node's HTTP server with the real openai client and a scripted engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from waiting import wait_for

QUESTION: list[Any] = [{"role": "user", "content": "Grüße, 世界 🙂!"}]


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(fake_node: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake_node.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=QUESTION)
    assert answer.choices[0].message.content == "Grüße, 世界 🙂!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == len("Grüße, 世界 🙂!".encode())


def test_streamed_characters_are_whole(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="echo", messages=QUESTION, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "Grüße, 世界 🙂!"
    assert not any("\ufffd" in text for text in texts)
    assert len([text for text in texts if text]) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_with_usage(client: openai.OpenAI) -> None:
    *_, last = client.chat.completions.create(
        model="echo", messages=say("abc"), stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage and last.usage.completion_tokens == 3
    *chunks, last = client.chat.completions.create(
        model="echo",
        messages=say("é!"),
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks] == [None, 2, 3, 3]
    assert last.usage and {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {last.usage.prompt_tokens}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_never_shown(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {"model": "echo", "messages": say("one, two END three"), "stop": [" END", "zzz"]}
    if stream:
        chunks = list(client.chat.completions.create(**request, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**request)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len("one, two END")
    assert (text, reason) == ("one, two", "stop")


def test_held_text_comes_out_when_no_stop_string_follows(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=say("almost EN"), stop="END", logprobs=True)
    assert answer.choices[0].message.content == "almost EN"
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content or []) == len("almost EN")


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo", messages=say("ab END"), logprobs=True, top_logprobs=2, stop="END"
    )
    assert answer.choices[0].logprobs
    content = answer.choices[0].logprobs.content or []
    assert [token.token for token in content] == ["a", "b", " "]
    assert [token.bytes for token in content] == [[97], [98], [32]]
    assert all(token.logprob == -0.5 and len(token.top_logprobs) == 2 for token in content)


def test_text_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="user\nabcdef", max_tokens=4, logprobs=1)
    assert answer.choices[0].text == "abcd"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    shown = client.completions.create(model="echo", prompt="user\n🙂é!", logprobs=1, max_tokens=9).choices[0]
    assert shown.logprobs and shown.logprobs.text_offset == [0, 0, 0, 0, 1, 1, 2]
    chunks = list(client.completions.create(model="echo", prompt="user\nabcdef", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcdef"


def test_prediction_is_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo", messages=say("0123456789"), prediction={"type": "content", "content": "01234xy"}
    )
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 2


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": say("x" * 1_000_000)}, 400, "messages", "context_length_exceeded"),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"top_k": 10**309}, 400, "top_k", "invalid_value"),
        ({"typical_p": 0}, 400, "typical_p", "invalid_value"),
        ({"min_tokens": -1}, 400, "min_tokens", "invalid_value"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 1e9}}, 400, "logit_bias", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"updraft": {"quality": 0.9}}, 400, "updraft", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0]", "invalid_value"),
        ({"use_beam_search": True}, 400, "use_beam_search", "unsupported_parameter"),
        ({"no_such_field": 1}, 400, "no_such_field", "invalid_value"),
        ({"messages": say("x" * 9_000_000)}, 413, None, "request_too_large"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(fake_node: Any, change: dict[str, Any], status: int, param: str, code: str, stream: bool) -> None:
    body = {"model": "echo", "messages": say("hi"), "stream": stream, **change}
    response = httpx.post(f"{fake_node.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["code"] == code
    assert httpx.get(f"{fake_node.url}/health").status_code == 200


def test_leaving_aborts_the_work(fake_node: Any) -> None:
    body = {"model": "echo", "messages": say("x" * 1900)}
    for stream in (False, True):
        before = gauge(fake_node.url, "aborted_requests_total")
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream(
                "POST", f"{fake_node.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=0.8
            ) as response,
        ):
            for _ in response.iter_raw():
                raise httpx.ReadTimeout("enough")
        wait_for(lambda before=before: gauge(fake_node.url, "aborted_requests_total") == before + 1)
        assert gauge(fake_node.url, "running") == 0


def test_failure_before_and_in_the_answer_and_health_after(spawn_fake_node: Any) -> None:
    url = spawn_fake_node("--delay", "0.01").url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        chunks: list[Any] = []
        with pytest.raises(openai.APIError, match="caught fire"):
            for chunk in client.chat.completions.create(model="echo", messages=say("break-middle"), stream=True):
                chunks.append(chunk)
        assert len(chunks) == 6
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="echo", messages=say("hi"), stream=True)
    assert caught.value.type == "engine_error"
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "caught fire" in health.json()["error"]["message"]


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_unusable_model_folder_is_one_line(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    if damage == "truncated":
        folder.mkdir()
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidd')
    result = subprocess.run(
        [sys.executable, "-m", "updraft", "node", "--port", "0", "--model", str(folder)],
        env={"PYTHONPATH": str(Path(__file__).parents[3] / ".typing")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert str(folder) in result.stderr


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"updraft_engine_{name} "))


def post(node: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{node.url}{path}", json=body, timeout=60)


def test_tokens_of_prompts_and_chats_and_back(fake_node: Any) -> None:
    plain = post(fake_node, "/tokenize", prompt="Grüße").json()
    assert (plain["count"], plain["max_model_len"]) == (len("Grüße".encode()), 2000)
    assert len(plain["tokens"]) == plain["count"]
    assert post(fake_node, "/detokenize", tokens=plain["tokens"]).json() == {"prompt": "Grüße"}
    chat = post(fake_node, "/tokenize", model="echo", messages=say("hi")).json()
    shown = post(fake_node, "/detokenize", tokens=chat["tokens"]).json()["prompt"]
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = httpx.post(
        f"{fake_node.url}/v1/chat/completions", json={"model": "echo", "messages": say("hi")}, timeout=60
    )
    assert answer.json()["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "special": True}, "special"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [65] * 2001}, "tokens"),
        ("/detokenize", {"tokens": [65] * 2_000_000}, "tokens"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_token_requests(fake_node: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(fake_node, path, **body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_latencies_are_measured(fake_node: Any, client: openai.OpenAI) -> None:
    def observed() -> dict[str, float]:
        lines = httpx.get(f"{fake_node.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if "_seconds" in line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before = observed()
    client.chat.completions.create(model="echo", messages=say("abcdef"))
    after = observed()
    for name in ("updraft_ttft_seconds", "updraft_tpot_seconds", "updraft_e2e_seconds"):
        assert after[f"{name}_count"] == before[f"{name}_count"] + 1
        assert after[f'{name}_bucket{{le="+Inf"}}'] == after[f"{name}_count"]
    spent = {
        name: after[f"{name}_sum"] - before[f"{name}_sum"] for name in ("updraft_ttft_seconds", "updraft_e2e_seconds")
    }
    assert 0 < spent["updraft_ttft_seconds"] < spent["updraft_e2e_seconds"]


def test_attempt_reports_the_cost_of_a_whole_answer(fake_node: Any) -> None:
    body = {"model": "echo", "messages": say("abc")}
    headers = {"x-updraft-attempt": "try-1"}
    usage = httpx.post(f"{fake_node.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()["usage"]
    spent = httpx.get(f"{fake_node.url}/spent/try-1").json()
    assert spent == usage and usage["completion_tokens"] > 0
    unknown = httpx.get(f"{fake_node.url}/spent/try-2")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
