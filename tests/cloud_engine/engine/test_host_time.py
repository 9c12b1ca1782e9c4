"""Work of the host per step: few modules for a plain step, and no copies of block tables."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from updraft.cloud_engine import engine as package
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.worker.model_runner import ForwardBatch

FOLDER = Path(package.__file__).parent


def started(make_engine: Any, make_prompts: Any, ask: Any, **params: Any) -> Engine:
    """An engine whose requests decode."""
    engine = make_engine()
    for request in ask(make_prompts(4), max_tokens=40, ignore_eos=True, repetition_detection=False, **params):
        engine.add_request(request)
    for _ in range(4):
        engine.step()
    return engine


def test_a_plain_step_crosses_few_modules(make_engine: Any, make_prompts: Any, ask: Any) -> None:
    engine = started(make_engine, make_prompts, ask)
    crossed: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(FOLDER):
            crossed.add(path.relative_to(FOLDER).as_posix())

    sys.setprofile(note)
    engine.step()
    sys.setprofile(None)
    assert {"engine.py", "worker/worker.py"} < crossed
    assert len(crossed) <= 15, sorted(crossed)


def test_attention_reads_the_block_tables_of_the_slots(make_engine: Any, make_prompts: Any, ask: Any) -> None:
    """A step copies no tables: each sequence states where its slot's table starts."""
    engine = started(make_engine, make_prompts, ask, presence_penalty=0.5)
    worker, batches = engine._worker, list[ForwardBatch]()
    compute = worker.runner.compute

    def noted(batch: ForwardBatch, unread: Any = None) -> Any:
        batches.append(batch)
        return compute(batch, unread)

    worker.runner.compute = noted  # type: ignore[method-assign]
    for _ in range(20):
        engine.step()
    for batch in batches:
        sequences = batch.sequences
        assert sequences.tables is worker.slots.tables
        assert (sequences.table[:-1] % worker.slots.tables.width == 0).all()
        assert len({*sequences.table[:-1].tolist()}) == 4
