"""Request fields that the device honours: several answers, prompt scores, grammars, template variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from router_fakes import CLOUD_TEXT, FakeCloud
from updraft.router.config import RouterConfig

USER: list[Any] = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}{{ '<think>\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp")
    from tiny_gguf import tiny_model

    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf").gguf


@pytest.fixture(scope="module")
def client(tiny: Path) -> Iterator[openai.OpenAI]:
    with updraft.OpenAI(config=RouterConfig(local=str(tiny)), max_retries=0) as client:
        yield client


def test_several_answers_are_those_of_consecutive_seeds() -> None:
    pytest.importorskip("llama_cpp")
    odd: list[Any] = [{"role": "user", "content": "zx qv jj 77 &"}]  # of which the model has no idea
    asked: dict[str, Any] = {"model": "local", "messages": odd, "max_tokens": 8, "temperature": 2.0}
    with updraft.OpenAI(config=RouterConfig(local="pocket"), max_retries=0) as client:
        several = client.chat.completions.create(**asked, n=3, seed=5)
        alone = [client.chat.completions.create(**asked, seed=5 + index) for index in range(3)]
        counted: Any = {"include_usage": True}
        streamed = list(client.chat.completions.create(**asked, n=3, seed=5, stream=True, stream_options=counted))
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert [each.message.content for each in several.choices] == [each.choices[0].message.content for each in alone]
    assert len({each.message.content for each in several.choices}) > 1
    pieces: dict[int, str] = {}
    finishes = {}
    for chunk in streamed:
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
            finishes |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert pieces == {choice.index: choice.message.content for choice in several.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in several.choices}
    assert streamed[-1].usage == several.usage
    assert [hasattr(chunk, "updraft") for chunk in streamed].count(True) == 1, "the last finish alone"
    assert several.usage is not None and alone[0].usage is not None
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    spent = sum(each.usage.completion_tokens for each in alone if each.usage is not None)
    assert several.usage.completion_tokens == spent


def test_no_gate_judges_several_answers(tiny: Path, cloud: FakeCloud) -> None:
    config = RouterConfig(local=str(tiny), cloud_url=cloud.url, cloud_model="pocket-large", confidence=1e-6)
    with updraft.OpenAI(config=config) as client:
        reply = client.chat.completions.create(model="auto", messages=USER, n=2)
    assert reply.choices[0].message.content == CLOUD_TEXT
    assert cloud.requests[-1]["n"] == 2


def test_prompt_scores_are_those_of_the_engine(client: openai.OpenAI, tiny: Path) -> None:
    from updraft.local_engine.engine import LocalEngine
    from updraft.protocol.requests import Message

    asked: dict[str, Any] = {"model": "local", "max_tokens": 1, "extra_body": {"prompt_logprobs": 2}}
    chat: Any = client.chat.completions.create(messages=USER, **asked)
    text: Any = client.completions.create(prompt="hello there", **asked)
    with LocalEngine.load(tiny) as engine:
        for entries, ids in (
            (chat.prompt_logprobs, engine.encode_chat([Message("user", "hello")])),
            (text.choices[0].prompt_logprobs, engine.encode_prompt("hello there")),
        ):
            scores = engine.score(ids)
            assert entries[0] is None and len(entries) == len(ids)
            for row, token, entry in zip(scores, ids[1:], entries[1:], strict=False):
                assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
                assert entry[str(token)]["rank"] == 1 + int((row > row[token]).sum())
                best = max(entry.items(), key=lambda each: each[1]["logprob"])
                assert (best[0], best[1]["rank"]) == (str(row.argmax()), 1)
                assert 2 <= len(entry) <= 3


def test_a_prompt_alone_comes_back_without_an_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "local", "prompt": ["hello", "you"], "max_tokens": 0}
    for echo in (True, False):
        text: Any = client.completions.create(**asked, echo=echo, extra_body={"prompt_logprobs": 0})
        assert [choice.text for choice in text.choices] == (["hello", "you"] if echo else ["", ""])
        assert {choice.finish_reason for choice in text.choices} == {"length"}
        assert all(len(choice.prompt_logprobs) > 1 for choice in text.choices)
        assert text.usage.completion_tokens == 0 < text.usage.prompt_tokens
    streamed = list(client.completions.create(**asked, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == "helloyou"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(**{**asked, "max_tokens": -2})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echoed_prompt_has_its_scores(client: openai.OpenAI, stream: bool, max_tokens: int) -> None:
    asked: dict[str, Any] = {"model": "local", "max_tokens": max_tokens, "temperature": 0.0, "logprobs": 2}
    scored: Any = client.completions.create(**asked, prompt="hello you", extra_body={"prompt_logprobs": 2})
    expected = scored.choices[0].prompt_logprobs
    if stream:
        chunks = [
            chunk.choices[0] for chunk in client.completions.create(**asked, prompt="hello you", echo=True, stream=True)
        ]
        parts: list[Any] = [chunk.logprobs.to_dict() for chunk in chunks if chunk.logprobs is not None]
        text = "".join(chunk.text for chunk in chunks)
        echoed = {name: [each for part in parts for each in part[name]] for name in parts[0]}
    else:
        choice = client.completions.create(**asked, prompt="hello you", echo=True).choices[0]
        assert choice.logprobs is not None
        text, echoed = choice.text, choice.logprobs.to_dict()
    assert text.startswith("hello you") and (text == "hello you") == (max_tokens == 0)
    assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    for token, logprob, entry in zip(echoed["tokens"][1:], echoed["token_logprobs"][1:], expected[1:], strict=False):
        own = next(iter(entry.values()))
        assert (own["decoded_token"], own["logprob"]) == (token, pytest.approx(logprob))
    for token, offset in zip(echoed["tokens"], echoed["text_offset"], strict=True):
        assert token.startswith("<|") or text[offset:].startswith(token) or "\ufffd" in token
    assert len(echoed["tokens"]) == len(expected) + min(max_tokens, len(echoed["tokens"]) - len(expected))


def test_stream_options_need_a_stream_on_every_tier(client: openai.OpenAI) -> None:
    options: Any = {"stream_options": {"include_usage": True}}
    for create in (
        lambda **more: client.chat.completions.create(messages=USER, **more),
        lambda **more: client.completions.create(prompt="a", **more),
    ):
        for model in ("local", "auto"):
            with pytest.raises(openai.BadRequestError) as refused:
                create(model=model, **options)
            assert refused.value.param == "stream_options"


def test_a_grammar_of_llama_cpp(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "local", "messages": USER, "max_tokens": 16, "temperature": 1.0}
    grammar = 'root ::= "yes" | "no" tail\ntail ::= [!?]{2}'
    for seed in range(4):
        reply = client.chat.completions.create(**asked, seed=seed, extra_body={"grammar": grammar})
        content = reply.choices[0].message.content or ""
        assert content == "yes" or (content[:2] == "no" and len(content) == 4)
    for fields, says in (
        ({"grammar": "root ::= elephant"}, "elephant"),
        ({"grammar": grammar, "json_schema": {}}, "exclude each other"),
    ):
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            client.chat.completions.create(**asked, extra_body=fields)
        assert refused.value.param in fields


def test_variables_reach_the_chat_template(tiny: Path, tmp_path: Path) -> None:
    """The template opens the model's reasoning, unless the request turns reasoning off."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    asked: dict[str, Any] = {"model": "local", "messages": USER, "max_tokens": 8}
    config = RouterConfig(local=str(tiny), chat_template=str(template))
    with updraft.OpenAI(config=config, max_retries=0) as client:

        def reply(**options: Any) -> Any:
            return client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": options})

        thinking, plain = reply(), reply(enable_thinking=False)
        assert thinking.choices[0].message.reasoning_content and not thinking.choices[0].message.content
        assert plain.choices[0].message.content and not hasattr(plain.choices[0].message, "reasoning_content")
        assert reply(enable_thinking="False").choices[0].message.content == plain.choices[0].message.content
        assert plain.usage.prompt_tokens > thinking.usage.prompt_tokens
        for wrong in ({"marks": "<|im_end|>"}, {"a b": 1}, {"messages": [1]}):
            with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
                reply(**wrong)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_strings_act_on_the_answer_alone(tiny: Path, tmp_path: Path, stream: bool) -> None:
    """The template opens the reasoning, which the model never ends, so no stop string counts."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    asked: dict[str, Any] = {"model": "local", "messages": USER, "max_tokens": 8, "stream": stream, "temperature": 0}
    with updraft.OpenAI(config=RouterConfig(local=str(tiny), chat_template=str(template)), max_retries=0) as client:

        def thoughts(**options: Any) -> str:
            answer: Any = client.chat.completions.create(**asked, **options)
            choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
            said = [choice.delta if stream else choice.message for choice in choices]
            assert not any(each.content for each in said) and choices[-1].finish_reason == "length"
            return "".join(getattr(each, "reasoning_content", None) or "" for each in said)

        free = thoughts()
        assert free and thoughts(stop=[free[len(free) // 2]]) == free
        off: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        text = client.chat.completions.create(**asked | {"stream": False}, **off).choices[0].message.content
        assert text
        stopped = client.chat.completions.create(**asked | {"stream": False}, **off, stop=[text[1]])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
            text[: text.index(text[1])],
            "stop",
        )


def test_reasoning_efforts_are_hints(tiny: Path, tmp_path: Path) -> None:
    """A template without reasoning ignores them with a note; others follow them."""
    template = tmp_path / "template.jinja"
    asked: dict[str, Any] = {"model": "local", "messages": USER, "max_tokens": 4}
    hints: list[dict[str, Any]] = [
        {"reasoning_effort": "high"},
        {"thinking": {"type": "enabled", "budget_tokens": 20}},
        {"think": True},
    ]
    for source, thinks in ((TEMPLATE, True), (TEMPLATE.partition("{% if")[0], False)):
        template.write_text(source)
        with updraft.OpenAI(config=RouterConfig(local=str(tiny), chat_template=str(template)), max_retries=0) as client:
            for hint in hints:
                answer: Any = client.chat.completions.create(**asked, extra_body=hint)
                assert hasattr(answer.choices[0].message, "reasoning_content") == thinks
                notes = getattr(answer, "updraft", {}).get("notes") or []
                assert [note.partition(":")[0] for note in notes] == ([] if thinks else list(hint))
            answer = client.chat.completions.create(**asked, reasoning_effort="none")
            assert not hasattr(answer.choices[0].message, "reasoning_content")
            response: Any = client.responses.create(model="local", input="hi", reasoning={"effort": "low"}, store=False)
            assert [note.partition(":")[0] for note in response.updraft.get("notes") or []] == ["reasoning.effort"] * (
                not thinks
            )
