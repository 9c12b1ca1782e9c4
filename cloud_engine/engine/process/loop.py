"""The engine's loop: what was asked is done between steps, and everything that comes of it is reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ....protocol.errors import EngineError, EngineRestartedError, UpdraftError
from ..engine import Engine
from ..types.outputs import StepOutputs
from ..types.request import GenerationRequest
from .grammar_compilation import Preparations
from .messages import Abort, Add, Close, Command, Failed, Prepared, Stepped
from .transport import CoreTransport

FAILURES_TO_GIVE_UP = 3
REPORT_EVERY_S = 0.002
REPORT_WHOLE_EVERY_S = 0.02
"""Shorter steps are told of together, but for first tokens and ends, and before prompts are read: every message wakes
the server, on a core that could compute. The longer time is for answers that nobody sees before their end."""

_log = logging.getLogger("updraft.engine")


class EngineLoop:
    """Runs `engine` by the commands that `transport` bring, until it is told to close.

    A request with a constraint has its place in the queue while that is compiled (`Preparations`). A failing step takes
    everything in flight with it: these requests get an EngineRestartedError with the cause, and the engine starts
    afresh.
    """

    def __init__(
        self, engine: Engine, transport: CoreTransport, *, before_step: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._before_step = before_step
        self._transport = transport
        self._report = transport.report
        self._failures = 0  # steps in a row
        self._unreported: list[StepOutputs] = []
        self._reported_at = 0.0
        self._preparations = Preparations(engine.prepare, lambda request_id: transport.send_back(Prepared(request_id)))

    def run(self) -> None:
        """Returns when told to close. Raises what the step raised after which `FAILURES_TO_GIVE_UP` have failed."""
        self._report_steps()
        try:
            while self._apply_commands():
                self._step()
        finally:
            self._preparations.close()

    def _apply_commands(self) -> bool:
        """Carry out what was asked since the last step, and wait until there is work. False: close."""
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
            case Prepared(request_id):
                with self._reporting_failure(request_id):
                    self._add_prepared(request_id)
            case Abort(request_id, index):
                self._preparations.cancel(request_id)
                self._engine.abort(request_id, index)
            case _:
                raise TypeError(f"A running engine takes no {type(command).__name__}.")

    def _add(self, request: GenerationRequest) -> None:
        if request.constraint is None:
            self._engine.add_request(request)
        else:
            self._engine.expect(request)
            try:
                self._preparations.begin(request)
            except BaseException:
                self._engine.abort(request.request_id)  # its place is for others now
                raise

    def _add_prepared(self, request_id: str) -> None:
        preparation = self._preparations.take(request_id)
        if preparation is None:
            return
        try:
            grammar = preparation.result()
        except BaseException:
            self._engine.abort(request_id)  # its place is for others now
            raise
        self._engine.add_request(preparation.request, grammar)

    @contextmanager
    def _reporting_failure(self, request_id: str) -> Generator[None]:
        """Taking in a request may fail for its own fault, or even ours: the others go on."""
        try:
            yield
        except UpdraftError as error:
            self._report(Failed([request_id], error))
        except Exception as error:  # noqa: BLE001 - told to who asked, and the engine lives on
            _log.exception("A request could not be taken in.")
            self._report(Failed([request_id], _failure_of(error, "ask differently")))

    def _step(self) -> None:
        try:
            if self._unreported and self._engine.reads_prompts:
                self._report_steps()
            self._before_step()
            outputs = self._engine.step()
        except Exception as error:
            self._failures += 1
            if self._failures == FAILURES_TO_GIVE_UP:
                raise
            _log.exception("A step of the engine failed; its requests are lost, the engine starts afresh.")
            lost = self._engine.reset()
            self._report_steps()
            self._report(Failed(lost, _failure_of(error, "ask again", EngineRestartedError)))
        else:
            self._failures = 0
            self._unreported.append(outputs)
            if self._is_report_due() or outputs.is_urgent or not self._engine.has_work:
                self._report_steps()

    def _is_report_due(self) -> bool:
        pause_s = REPORT_EVERY_S if self._engine.is_streaming else REPORT_WHOLE_EVERY_S
        return time.monotonic() - self._reported_at >= pause_s

    def _report_steps(self) -> None:
        self._report(Stepped(self._unreported, self._engine.stats()))
        self._unreported, self._reported_at = [], time.monotonic()


def _failure_of(cause: BaseException, advice: str, kind: type[EngineError] = EngineError) -> EngineError:
    failure = kind(f"The engine failed ({type(cause).__name__}: {cause}): {advice}.")
    failure.__cause__ = cause
    return failure
