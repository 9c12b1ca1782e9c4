"""Runs both pocket models over tasks and grades the answers.

The result is the classifier's training data: each task's local run with signals, and whether each tier was right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.progress import track

from ..classifier.features.blocks import graded_run
from ..classifier.features.gate_inputs import RunView
from ..classifier.graded_row import GradedRow
from ..cloud_engine.engine.config import EngineConfig
from ..cloud_engine.engine.engine import Engine
from ..cloud_engine.engine.types.request import GenerationRequest
from ..local_engine.engine import LocalEngine
from ..protocol.requests import Message
from ..protocol.sampling import SamplingParams
from .tasks import Task, check

_GREEDY = SamplingParams(temperature=0.0)


def collect(tasks: Sequence[Task], small_gguf: Path, large_folder: Path) -> list[GradedRow]:
    """Return one graded row per task, in order."""
    views = list(track(local_views(tasks, small_gguf), "local ", total=len(tasks)))
    answers = cloud_answers(tasks, large_folder)
    return [
        graded_run(view, float(check(task, view.answer)), float(check(task, answer)), task.kind, task.family)
        for task, view, answer in zip(tasks, views, answers, strict=True)
    ]


def cloud_answers(tasks: Sequence[Task], large_folder: Path) -> list[str]:
    """Return greedy answers of the cloud model, in order. The engine batches them."""
    # One thread: on a busy machine, two threads that meet at barriers take ten times as long for such a small model.
    config = EngineConfig(max_num_seqs=32, max_waiting=len(tasks), threads=1)
    engine = Engine.from_folder(large_folder, config=config)
    tokens: dict[str, list[int]] = {task.id: [] for task in tasks}
    for task in tasks:
        prompt_ids = engine.tokenizer.encode_chat([Message("user", task.prompt)])
        engine.add_request(GenerationRequest(task.id, prompt_ids, _GREEDY))
    for output in track(_outputs(engine), "cloud ", total=len(tasks)):
        tokens[output[0]] = output[1]
    return [engine.tokenizer.decode(tokens[task.id]) for task in tasks]


def _outputs(engine: Engine) -> Iterator[tuple[str, list[int]]]:
    """Yield each request's id and tokens when the request finishes."""
    partial: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            partial.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                yield output.request_id, partial.pop(output.request_id)


def local_views(tasks: Sequence[Task], small_gguf: Path) -> Iterator[RunView]:
    """Yield greedy runs of the local model, in order, one at a time."""
    with LocalEngine.load(small_gguf) as engine:
        for task in tasks:
            messages = [Message("user", task.prompt)]
            with closing(engine.start(messages, _GREEDY)) as run:
                for _ in run:
                    pass
                yield RunView.of(messages, run, run.signals)
