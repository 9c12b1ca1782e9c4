"""Parts that no rule can read stay on the device or are refused, wherever they are, while any rule is on."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from typing import Any

import pytest
from cascade_bench import run
from router_fakes import FakeCloud, ScriptedGates
from updraft.protocol.http.wire import WireRequest
from updraft.router.privacy import rules as module
from updraft.router.privacy.rules import BUILTIN, Privacy, PrivacyRules
from updraft.router.privacy.unreadable import AUDIO, DATA, FILE, IMAGE, PART, TOKEN_IDS, TOO_LONG

ONE = Privacy(patterns={"mine": "aurora"})
PICTURE = base64.b64encode(random.Random(1).randbytes(600)).decode()
URI = f"data:image/png;base64,{PICTURE}"


def message(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


UNREADABLE: list[tuple[str, dict[str, Any]]] = [
    (IMAGE, message([part("text", text="what is this?"), part("image_url", image_url={"url": "https://x.example/a.png"})])),
    (IMAGE, message([part("image_url", image_url={"url": URI})])),
    (IMAGE, message([part("input_image", image_url="https://x.example/a.png")])),
    (IMAGE, message([part("video_url", video_url={"url": "https://x.example/a.mp4"})])),
    (IMAGE, message([part("image", source={"type": "url", "url": "x"})], role="tool", tool_call_id="1")),
    (IMAGE, message("look", images=[PICTURE[:20]])),
    (AUDIO, message([part("input_audio", input_audio={"data": "UklGRg==", "format": "wav"})])),
    (AUDIO, message(None, role="assistant", audio={"id": "audio_1"})),
    (FILE, message([part("file", file={"file_id": "file-1"})])),
    (FILE, message([part("document", source={"type": "text"})])),
    (PART, message([part("hologram", text="hi")])),
    (PART, message([{"text": "no type"}])),
    (PART, message([7, "x"])),
    (PART, message({"text": "hi"})),
    (PART, message("hi") | {"prediction": {"type": "content", "content": [part("thing", text="hi")]}}),
    (IMAGE, message("hi") | {"prediction": {"type": "content", "content": [part("image", source={"url": URI})]}}),
    (IMAGE, message("hi") | {"metadata": {"scan": URI}}),
    (DATA, message("hi") | {"metadata": {"scan": PICTURE}}),
    (IMAGE, message(f"look: ![it]({URI})")),
    (DATA, message(json.dumps({"data": PICTURE, "mimeType": "image/png"}), role="tool", tool_call_id="1")),
    (DATA, message("\n".join(PICTURE[start : start + 76] for start in range(0, len(PICTURE), 76)))),
    (IMAGE, message("hi") | {"tools": [{"type": "function", "function": {"name": "f", "description": URI}}]}),
    (FILE, message("hi") | {"attachments": [{"file_id": "f-1"}]}),
    (TOKEN_IDS, message("hi") | {"prompt": [15496, 995]}),
    (TOKEN_IDS, message("hi") | {"prompt": ["text", [15496, 995]]}),
    (TOKEN_IDS, message("hi") | {"prompt_token_ids": [1, 2]}),
    (TOKEN_IDS, {"input": 15496}),
    (TOKEN_IDS, {"input": [[15496, 995]]}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "body"), UNREADABLE)
def test_unreadable_parts_match_if_any_rule_is_on(what: str, body: dict[str, Any]) -> None:
    assert asyncio.run(PrivacyRules(ONE).match(body)) == what
    assert asyncio.run(PrivacyRules(Privacy()).match(body)) is None


SCHEMA = {
    "type": "object",
    "properties": {"image": {"type": "string"}, "file": {"enum": [1, 2]}, "type": {"type": "string"}},
}
READABLE: list[dict[str, Any]] = [
    message([part("text", text="hi", cache_control={"type": "ephemeral"})]),
    message([part("refusal", refusal="no")], role="assistant"),
    message("hi", role="assistant", annotations=[], audio=None, tool_calls=[], refusal=None, reasoning_content="so"),
    message("hi") | {"tools": [{"type": "function", "function": {"name": "save_file", "parameters": SCHEMA}}]},
    message("hi") | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    message("hi") | {"metadata": {"type": "document review", "file": "a.txt"}},
    message("hi") | {"stop": ["a", "b"], "logit_bias": {"50256": -100}},
    message("hi") | {"prediction": {"type": "content", "content": [part("text", text="hi")]}, "modalities": ["text"]},
    message(json.dumps({"rows": [1, 2, 3], "type": "file", "name": "a.txt"}), role="tool", tool_call_id="1"),
    message("see data:text/plain,hello and data: base64"),
]  # fmt: skip


@pytest.mark.parametrize("body", READABLE)
def test_readable_parts_pass(body: dict[str, Any]) -> None:
    assert asyncio.run(PrivacyRules(ONE).match(body)) is None


def test_a_picture_is_refused_as_private_where_the_device_cannot_see_it(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(before=True), privacy=ONE) as b:
            picture = message([part("image_url", image_url={"url": URI})])
            for model in ("auto", "cloud"):
                error = (await b.answer(model, **picture))["error"]
                assert (error["code"], IMAGE in error["message"]) == ("private", True)
            body = json.dumps({"model": "auto", "input": [1, 2]}).encode()
            refused = await b.handle(WireRequest("POST", "/v1/embeddings", body=body))
            assert json.loads(refused.body)["error"]["code"] == "private"
            assert not cloud.requests
            metadata = {"metadata": {"scan": PICTURE}}
            info = (await b.answer(**metadata)).get("updraft")
            assert info is None or info["tier"] == "local"
            assert not cloud.requests

    run(test())


def test_signatures_of_thoughts_stay_here_and_hold_nothing_back(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(privacy=ONE) as b:
            signed = [{"type": "thinking", "thinking": "Hm.", "signature": PICTURE}]
            turns = [
                {"role": "assistant", "content": "hi", "thinking_blocks": signed},
                {"role": "user", "content": "so?"},
            ]
            answer = await b.answer("cloud", messages=[*message("hi")["messages"], *turns])
            assert answer["updraft"]["tier"] == "cloud"
            assert "thinking_blocks" not in cloud.requests[0]["messages"][1]

    run(test())


@pytest.mark.parametrize(
    "text",
    ["\ufdfa" * 2_700_000, "a" * 8_000_000, "%25" * 2_000_000, "\u0041\u030a" * 2_200_000, "&amp;" * 1_500_000,
     json.dumps(json.dumps(json.dumps("x\\" * 400_000)))],
)  # fmt: skip
def test_too_long_a_text_is_private_after_bounded_work(text: str) -> None:
    rules = PrivacyRules(Privacy(builtin=tuple(BUILTIN), patterns={"mine": r"\bsecret\b"}))
    began = time.process_time()
    assert asyncio.run(rules.match(message(text))) == TOO_LONG
    assert time.process_time() - began < 8


def test_layer_on_layer_of_escapes_is_private() -> None:
    assert asyncio.run(PrivacyRules(ONE).match(message("%" + "25" * 5000))) == TOO_LONG


def test_the_work_of_reading_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes, JSON in JSON and what Unicode makes of a character all count as read."""
    monkeypatch.setattr(module, "MAX_READ", 1000)
    rules = PrivacyRules(ONE)
    assert asyncio.run(rules.match(message("a" * 900))) is None
    for text in ("a" * 1001, "%41" * 300, json.dumps("a" * 600), "\ufdfa" * 60):
        assert asyncio.run(rules.match(message(text))) == TOO_LONG


def test_long_scan_does_not_block_the_event_loop() -> None:
    """The event loop turns many times during one search."""
    rules = PrivacyRules(Privacy(builtin=tuple(BUILTIN)))

    async def test() -> int:
        long = asyncio.create_task(rules.match(message("Grüße, \ufdfa und 12 mehr. " * 60_000)))
        turns = 0
        while not long.done():
            assert await rules.match(message("hello")) is None
            await asyncio.sleep(0.001)
            turns += 1
        await long
        return turns

    assert asyncio.run(test()) >= 3
