"""The event loop belongs to all requests: what one of them sends or answers at length is read beside it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from cascade_bench import run
from router_fakes import FakeCloud, ScriptedGates
from updraft.router import router

LONG = "word " * 2000


class WatchedGates(ScriptedGates):
    """Keeps by which thread each gate is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[int, set[int]] = {}

    def _verdict(self, gate: int, escalate: bool) -> Any:
        self.threads.setdefault(gate, set()).add(threading.get_ident())
        return super()._verdict(gate, escalate)


@pytest.mark.parametrize(("question", "answer"), [(LONG, "one two three four five"), ("hello", LONG)])
@pytest.mark.parametrize("hold_tokens", [None, 3])
def test_no_gate_reads_long_texts_on_the_loop(
    bench: Any, cloud: FakeCloud, question: str, answer: str, hold_tokens: int | None
) -> None:
    async def test() -> None:
        gates = WatchedGates()
        async with bench(gates, hold_tokens=hold_tokens) as b:
            b.local.text = answer
            await b.stream(messages=[{"role": "user", "content": question}])
        assert set(gates.threads) == {1, 2, 3}
        on_loop = {gate for gate, threads in gates.threads.items() if threading.get_ident() in threads}
        assert on_loop == (set() if question == LONG else {1, 2}), "gate 2 begins while the answer is short"
        assert 3 not in on_loop

    run(test())
    assert not cloud.requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_long_bodies_are_not_read_on_the_loop(
    bench: Any, cloud: FakeCloud, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()

    def watched(work: Any) -> Any:
        def run(*words: Any, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return work(*words, **options)

        return run

    for name in ("read_model", "read_routing_request"):
        monkeypatch.setattr(router, name, watched(getattr(router, name)))

    async def test() -> None:
        async with bench() as b:
            body = {"model": "auto", "input": LONG * 20, "messages": [{"role": "user", "content": LONG * 20}]}
            await b.handle(router.WireRequest("POST", path, {}, router.msgspec.json.encode(body)))
        assert threads
        assert threading.get_ident() not in threads

    run(test())
