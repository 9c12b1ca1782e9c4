"""The loop's reports of its steps: rare where they are short, at once where somebody waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import pytest
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process import loop
from updraft.cloud_engine.engine.process.loop import REPORT_EVERY_S, REPORT_WHOLE_EVERY_S, EngineLoop
from updraft.cloud_engine.engine.process.messages import Abort, Add, Close, Command, CoreTransport, OutputReport, Report
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.sampling import SamplingParams

TOKENS = 60


class Script(CoreTransport):
    """Hands out commands, each at its step, and keeps what is reported, with the step that it came after."""

    def __init__(self, engine: Engine, commands: Sequence[tuple[int, Command]]) -> None:
        self.reports: list[tuple[int, OutputReport]] = []
        self._engine = engine
        self._commands = deque(commands)

    def next_command(self, wait: bool) -> Command | None:
        if self._commands and (wait or self._commands[0][0] <= self._engine.stats().steps):
            return self._commands.popleft()[1]
        return Close() if wait else None

    def report(self, what: Report) -> None:
        assert isinstance(what, OutputReport)
        self.reports.append((self._engine.stats().steps, what))

    def send_back(self, command: Command) -> None:
        raise AssertionError("nothing is prepared here")

    def outputs(self) -> list[tuple[int, list[TokenOutput]]]:
        """The report, if there was one."""
        steps = [(step, list(chain.from_iterable(report.outputs))) for step, report in self.reports]
        return [(step, outputs) for step, outputs in steps if outputs]


def asked(name: str, *, streamed: bool, tokens: int = TOKENS) -> Add:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    return Add(GenerationRequest(name, [1, 2, 3], params, streamed=streamed))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, make_engine):
    """Run commands to their end, with steps of `step_s` seconds."""

    def run(step_s: float, *commands: tuple[int, Command], **config: int) -> Script:
        engine = make_engine(**config)
        script = Script(engine, commands)
        monkeypatch.setattr(loop.time, "monotonic", lambda: engine.stats().steps * step_s)
        EngineLoop(engine, script).run()
        return script

    return run


def tokens_of(script: Script, name: str) -> list[int]:
    outputs = chain.from_iterable(outputs for _, outputs in script.outputs())
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


@pytest.mark.parametrize(("streamed", "every_s"), [(True, REPORT_EVERY_S), (False, REPORT_WHOLE_EVERY_S)])
def test_outputs_of_short_steps_are_batched(run, streamed: bool, every_s: float) -> None:
    script = run(every_s / 9.5, (0, asked("a", streamed=streamed)))
    steps = [step for step, _ in script.outputs()]
    assert steps == [1, 11, 21, 31, 41, 51, 60], "the first token at once, and the end"
    singly = run(1.0, (0, asked("a", streamed=streamed)))
    assert [step for step, _ in singly.outputs()] == list(range(1, TOKENS + 1)), "long ones are not held back"
    assert tokens_of(script, "a") == tokens_of(singly, "a")
    assert len(tokens_of(script, "a")) == TOKENS


def test_fast_readers_do_not_wait_for_slow_ones(run) -> None:
    whole, streamed = asked("whole", streamed=False), asked("streamed", streamed=True, tokens=20)
    script = run(1.01 * REPORT_EVERY_S, (0, whole), (10, streamed))
    steps = [step for step, _ in script.outputs()]
    assert steps[0] == 1, "it begins"
    assert set(range(11, 31)) <= set(steps), "each of the other's tokens, its end and its beginning"
    assert [step for step in steps if step > 30] == [40, 50, 60]
    assert len(tokens_of(script, "whole")) == TOKENS


def test_end_of_an_answer_is_sent_at_once(run) -> None:
    script = run(0.0, (0, asked("a", streamed=False)), (0, asked("b", streamed=False, tokens=25)))
    assert [step for step, _ in script.outputs()] == [1, 25, 60]


def test_a_reader_who_left_holds_nobody_to_short_pauses(run) -> None:
    commands = (0, asked("whole", streamed=False)), (0, asked("streamed", streamed=True)), (5, Abort("streamed"))
    script = run(1.01 * REPORT_EVERY_S, *commands)
    assert [step for step, _ in script.outputs()] == [1, 2, 3, 4, 5, 15, 25, 35, 45, 55, 60]


def test_outputs_are_sent_before_a_step_with_prompts(run) -> None:
    """It may take long: a prompt of several steps begins at the eleventh."""
    prompt = Add(GenerationRequest("long", [1] * 100, SamplingParams(temperature=0.0, max_tokens=1), streamed=False))
    script = run(0.0, (0, asked("a", streamed=True, tokens=30)), (10, prompt), max_num_batched_tokens=33)
    steps = [step for step, _ in script.outputs()]
    assert steps[:5] == [1, 10, 11, 12, 13], "and then the prompt is read, its only token has come"
    assert steps[5:] == [14, 30]


def test_idle_engine_has_sent_all_outputs(run) -> None:
    """Also of a request that was given up, and counters without any outputs."""
    script = run(0.0, (0, asked("a", streamed=False)), (30, Abort("a")))
    step, last = script.reports[-1]
    assert (step, last.stats.running, last.stats.aborted_requests) == (30, 0, 1)
