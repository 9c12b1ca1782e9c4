"""What `/tokenize` and `/detokenize` cost others: nothing that is long is done on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from updraft.cloud_engine.node.app import Served, create_node_app
from updraft.text.tokenizer import Tokenizer

POCKET = Path(__file__).resolve().parents[3] / "embedded" / "weights" / "pocket-large"


class Engine:
    failure = None

    async def close(self) -> None: ...


class Patient(Tokenizer):
    """Whatever it is asked takes until somebody else was answered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answered = threading.Event()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.answered.wait(10))

    def encode_prompt(self, text: str) -> list[int]:
        return [int(self.answered.wait(10))]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/detokenize", b'{"tokens": [65]}', {"prompt": "True"}),
        ("/tokenize", b'{"prompt": "A"}', {"count": 1, "max_model_len": 4096, "tokens": [1], "token_strs": None}),
    ],
)
def test_others_are_answered_meanwhile(path: str, body: bytes, answer: dict[str, Any]) -> None:
    tokenizer = Patient.from_folder(POCKET)
    assert isinstance(tokenizer, Patient)
    engine: Any = Engine()
    app = create_node_app(Served(engine, tokenizer, "patient", 4096))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
            asking = asyncio.create_task(client.post(path, content=body + b" " * 100_000))
            await asyncio.sleep(0.1)
            assert (await client.get("/health")).status_code == 200
            tokenizer.answered.set()
            return await asking

    assert asyncio.run(ask()).json() == answer
