"""`/tokenize` and `/detokenize` cost others little: nothing that is long is done on the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from updraft.cloud_engine.node.api.app import NodeEngine, create_node_app
from updraft.protocol.errors import InvalidRequestError
from updraft.text.chat import ChatTemplate
from updraft.text.tokenization import parse_tokenize, tokenized
from updraft.text.tokenizer import Tokenizer

POCKET = Path(__file__).resolve().parents[4] / "embedded" / "weights" / "pocket-large"


class Engine:
    failure = None

    async def close(self) -> None: ...


class Patient(Tokenizer):
    """Whatever it is asked takes until somebody else was answered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answered = threading.Event()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.answered.wait(60))

    def encode_prompt(self, text: str) -> list[int]:
        return [int(self.answered.wait(60))]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/detokenize", b'{"tokens": [65]}', {"prompt": "True"}),
        ("/tokenize", b'{"prompt": "A"}', {"count": 1, "max_model_len": 4096, "tokens": [1], "token_strs": None}),
    ],
)
def test_other_requests_are_answered_meanwhile(path: str, body: bytes, answer: dict[str, Any]) -> None:
    tokenizer = Patient.from_folder(POCKET)
    assert isinstance(tokenizer, Patient)
    engine: Any = Engine()
    app = create_node_app(NodeEngine(engine, tokenizer, "patient", 4096))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
            asking = asyncio.create_task(client.post(path, content=body + b" " * 100_000))
            await asyncio.sleep(0.1)
            assert (await client.get("/health")).status_code == 200
            tokenizer.answered.set()
            return await asking

    assert asyncio.run(ask()).json() == answer


SAYS = {"role": "user", "content": "a"}
ANSWERS = {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "look_up"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [SAYS, ANSWERS], "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [SAYS], "continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
        ),
        ({"messages": [SAYS], "tools": [{"type": "function"}]}, "tools[0]"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
    ],
)
def test_chat_refusals_apply_to_tokenization(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tokenize(json.dumps(body).encode())
    assert caught.value.param == param


def test_tools_are_part_of_the_prompt() -> None:
    template = "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    loaded = Tokenizer.from_folder(POCKET)
    tokenizer = Tokenizer(
        (POCKET / "tokenizer.json").read_text(), eos_ids=loaded.eos_ids, chat_template=ChatTemplate(template)
    )
    request = parse_tokenize(json.dumps({"messages": [SAYS], "tools": [TOOL]}).encode())
    assert tokenizer.decode(tokenized(tokenizer, request, 4096).tokens) == "look_up;a"
    assert sum(map(len, request.texts)) >= len("look_up;a") - 1
