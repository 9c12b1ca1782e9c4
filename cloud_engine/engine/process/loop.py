"""The engine loop: applies commands between steps and reports all results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ....protocol.errors import EngineError, RequestFailedError, UpdraftError
from ....protocol.sampling import SamplingParams
from ..engine import Engine
from ..types.outputs import StepOutputs
from ..types.request import GenerationRequest, Resumption
from .grammar_compilation import GrammarJobs
from .messages import (
    Abort,
    Add,
    Close,
    Command,
    CompileNotice,
    CoreTransport,
    FailureReport,
    OutputReport,
    Sleep,
    SleepReport,
    StepFailureReport,
)

FAILURES_TO_GIVE_UP = 3
"""Consecutive failed steps, the last ones with a request of one token, after which the engine is down."""
REPORT_EVERY_S = 0.002
REPORT_WHOLE_EVERY_S = 0.02
"""Seconds between reports, with and without streamed answers. Shorter steps are reported together, because every
message wakes the server on a CPU core that could compute; first and last tokens are reported at once."""

_log = logging.getLogger("updraft.engine")
_PROBE = GenerationRequest("probe", [0], SamplingParams(temperature=0.0, max_tokens=1), resumed=Resumption({0: []}))


class EngineLoop:
    """Runs `engine` with the commands of `transport` until a `Close` command.

    A request keeps its place in the queue while its constraint is compiled (`GrammarJobs`). If a step fails, the engine
    is reset, and the client adds the requests again (`Recovery`).
    """

    def __init__(
        self, engine: Engine, transport: CoreTransport, *, before_step: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._before_step = before_step
        self._transport = transport
        self._report = transport.report
        self._unreported: list[StepOutputs] = []
        self._reported_at = 0.0
        self._grammars = GrammarJobs(engine.prepare, lambda request_id: transport.send_back(CompileNotice(request_id)))

    def run(self) -> None:
        """Run until a `Close` command. Raises the error of a failed step if the engine fails on any request."""
        self._report_steps()
        try:
            while self._apply_commands():
                self._step()
        finally:
            self._grammars.close()

    def _apply_commands(self) -> bool:
        """Apply pending commands, waiting for commands while the engine has no work. Return False on `Close`."""
        while True:
            applied = 0
            while command := self._transport.next_command(not (self._engine.has_work or applied)):
                if isinstance(command, Close):
                    return False
                self._apply(command)
                applied += 1
            if self._engine.has_work:
                return True
            if applied:
                self._report_steps()

    def _apply(self, command: Command) -> None:
        match command:
            case Add(request):
                with self._reporting_failure(request.request_id):
                    self._add(request)
            case CompileNotice(request_id):
                with self._reporting_failure(request_id):
                    self._add_prepared(request_id)
            case Abort(request_id, index):
                self._grammars.cancel(request_id)
                self._engine.abort(request_id, index)
            case Sleep(asleep):
                self._engine.sleep() if asleep else self._engine.wake()
                self._report(SleepReport(asleep))
            case _:
                raise TypeError(f"Unexpected command to a running engine: {type(command).__name__}.")

    def _add(self, request: GenerationRequest) -> None:
        if request.constraint is None:
            self._engine.add_request(request)
        else:
            self._engine.expect(request)
            try:
                self._grammars.begin(request)
            except BaseException:
                self._engine.abort(request.request_id)  # free its place in the queue
                raise

    def _add_prepared(self, request_id: str) -> None:
        preparation = self._grammars.take(request_id)
        if preparation is None:
            return
        try:
            grammar = preparation.result()
        except BaseException:
            self._engine.abort(request_id)  # free its place in the queue
            raise
        self._engine.add_request(preparation.request, grammar)

    @contextmanager
    def _reporting_failure(self, request_id: str) -> Generator[None]:
        """If a request cannot be added, report the error to this request's client, and let other requests continue."""
        try:
            yield
        except UpdraftError as error:
            self._report(FailureReport([request_id], error))
        except Exception as error:  # noqa: BLE001 - reported to the client, and the engine continues
            _log.exception("A request could not be added to the engine.")
            self._report(FailureReport([request_id], _failure_of(error, "change the request")))

    def _step(self) -> None:
        try:
            if self._unreported and self._engine.reads_prompts:
                self._report_steps()
            self._before_step()
            outputs = self._engine.step()
        except Exception as error:
            if not self._engine.survives_failures:
                raise
            suspects, lost = self._engine.suspects, self._engine.reset()
            self._report_steps()
            if not self._works():
                raise
            _log.exception("An engine step failed; its requests are computed again.")
            self._report(
                StepFailureReport(lost, suspects, _failure_of(error, "change the request", RequestFailedError))
            )
        else:
            self._unreported.append(outputs)
            if self._is_report_due() or outputs.is_urgent or not self._engine.has_work:
                self._report_steps()

    def _works(self) -> bool:
        """Return whether the engine, which has no requests, can answer a request of one token."""
        for _ in range(FAILURES_TO_GIVE_UP - 1):
            try:
                self._engine.add_request(_PROBE)
                while self._engine.has_work:
                    self._engine.step()
            except Exception:  # noqa: BLE001 - the caller raises the error of the first failure
                _log.exception("The engine fails on any request.")
                self._engine.reset()
            else:
                return True
        return False

    def _is_report_due(self) -> bool:
        pause_s = REPORT_EVERY_S if self._engine.is_streaming else REPORT_WHOLE_EVERY_S
        return time.monotonic() - self._reported_at >= pause_s

    def _report_steps(self) -> None:
        self._report(OutputReport(self._unreported, self._engine.stats()))
        self._unreported, self._reported_at = [], time.monotonic()


def _failure_of(cause: BaseException, advice: str, kind: type[EngineError] = EngineError) -> EngineError:
    failure = kind(f"The engine failed ({type(cause).__name__}: {cause}): {advice}.")
    failure.__cause__ = cause
    return failure
