"""Passthrough APIs that only some nodes offer: OpenAI's Responses and audio, and Anthropic's Messages.

Only the usage is read. A stream that breaks off ends in the API's own error event; no other node continues it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from ....accounting.budget import StreamTokenEstimate
from ....accounting.reported_usage import ReportedUsage
from ....accounting.token_estimate import prompt_tokens
from ....protocol.errors import UpdraftError, UpstreamError
from ....protocol.http import sse
from ....protocol.http.body_memory import SMALL_BYTES
from ..ledger.metering import UsageRow
from ..upstream.failures import AnswerFailure
from .answer_checks import COUNT_TOKENS, INPUT_TOKENS, MESSAGES, RESPONSES, event_of, reported_in, written_bytes
from .usage import estimated_tokens, usage_in

COUNTS = (COUNT_TOKENS, INPUT_TOKENS)  # endpoints that count tokens, free of charge
SPEECH = "/v1/audio/speech"
UPLOADS = ("/v1/audio/transcriptions", "/v1/audio/translations")
PATHS = (RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, SPEECH, *UPLOADS)
_ENDS = frozenset(
    ("response.completed", "response.incomplete", "response.failed", "message_stop", "error", "transcript.text.done",
     "speech.audio.done")
)  # fmt: skip
_COUNTED = (*_ENDS, "message_delta")  # events that report the usage of the whole answer
_FAILED = ("error", "response.failed")
_BEFORE_START = ("", "ping", "error")  # Messages events that may precede `message_start`
_SEQUENCE = re.compile(rb'"sequence_number":\s?(\d+)')
_ANTHROPIC_TYPES = {503: "overloaded_error", 504: "timeout_error"}


class PassthroughUsage:
    """Reads the usage and the end of one answer, while the answer is relayed unchanged."""

    def __init__(self, path: str, row: UsageRow, prompt_estimate: int = 0) -> None:
        """Prepare to read an answer. `prompt_estimate`: prompt tokens to assume if the node reports only a total."""
        self._path = path
        self._prompt_estimate = prompt_estimate
        self._row = row
        self._texts = 0  # number of events with text so far
        self._bytes = 0  # bytes of text in all events
        self._last = b""
        #: The last event read, as strict JSON; empty to drop it.
        self.shown = b""
        self.ended = False
        self.is_reported = False  # whether the usage of the whole answer has arrived
        self._is_started = path != MESSAGES  # whether the event that every other event builds on has arrived
        self._has_reason = path != MESSAGES  # whether the event with the stop reason has arrived

    def read(self, event: bytes) -> AnswerFailure | None:
        """Record an event. Return a failure if the event is malformed or reports an error. Events after the end are
        dropped."""
        self.shown = event
        if self.ended:
            self.shown = event if sse.data_of(event) in (b"", b"[DONE]") else b""
            return None
        try:
            decoded, self.shown = event_of(event)
        except AnswerFailure as failure:
            return failure
        kind, event = decoded.type, self.shown
        text_bytes = written_bytes(sse.data_of(event)) if kind else 0
        self._is_started = self._is_started or kind == "message_start"
        if not self._is_started and kind not in _BEFORE_START:
            return AnswerFailure(f"the event {kind} came before message_start")
        self._has_reason = self._has_reason or kind == "message_delta"
        if kind == "message_stop" and not self._has_reason:
            return AnswerFailure("the event message_stop came before message_delta")
        self._last = event[:SMALL_BYTES]
        self._texts += text_bytes > 0
        self._bytes += text_bytes
        if kind == "message_start":
            self._row.cached_tokens = self._row.stored_tokens = self._row.stored_1h_tokens = 0  # of a failed node
        if kind in _COUNTED or b'_tokens"' in event:
            has_usage = self._note(sse.data_of(event))
            self.is_reported = self.is_reported or (has_usage and kind in _COUNTED)
        if kind in _ENDS and not (self.is_reported or self._texts):  # the end contains the only text
            self._row.completion_tokens = max(self._row.completion_tokens, self._estimated(sse.data_of(event)))
        self.ended = self.ended or kind in _ENDS
        if kind not in _FAILED:
            return None
        self._row.status = UpstreamError.status
        return AnswerFailure("the stream reports an error", reported_in(sse.data_of(event)))

    @property
    def is_text(self) -> bool:
        """Return whether the API streams its text as events."""
        return self._path in (RESPONSES, MESSAGES)

    def whole(self, body: bytes) -> None:
        if self._path not in COUNTS:
            self._note(body)
            self._row.completion_tokens = self._row.completion_tokens or self._estimated(body)

    def estimate(self, reserved: int = 0) -> StreamTokenEstimate:
        """Return the tokens of the stream so far, estimated from its text."""
        return StreamTokenEstimate(reserved, self._texts, self._bytes)

    def settle(self) -> None:
        """Record the usage of a stream. Without the usage of the whole answer, the estimate from the text counts too:
        the usage at the beginning may be lower."""
        if not self.is_reported:
            self._row.completion_tokens = max(self._row.completion_tokens, self.estimate().written)

    def error_event(self, error: UpdraftError) -> bytes:
        """Return the error event that ends a failed stream, in this API's format."""
        if self._path == MESSAGES:
            kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
            return b"event: error\n" + sse.event({"type": "error", "error": {"type": kind, "message": error.message}})
        said = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
        if (match := _SEQUENCE.search(self._last)) is not None:
            said["sequence_number"] = int(match[1]) + 1
        return b"event: error\n" + sse.event(said)

    def error_body(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return a node's error in this API's format."""
        return {"type": "error", "error": error} if self._path in (MESSAGES, COUNT_TOKENS) else {"error": error}

    def _estimated(self, payload: bytes) -> int:
        """Estimate the tokens of an answer, or of a last event that contains the whole answer."""
        if self._path not in UPLOADS:
            return estimated_tokens(payload) if self.is_text else 0  # speech has no text
        with suppress(ValueError):
            return estimated_tokens(payload, ("text",))
        return prompt_tokens(payload)  # a transcript that is not JSON

    def _note(self, payload: bytes) -> bool:
        """Copy the usage in `payload` into the row. Return whether the usage counts completion tokens.

        The last usage of Anthropic's streams may lack prompt tokens, or only the cached ones.
        """
        row = self._row
        if not (usage := usage_in(payload, self._prompt_estimate)):
            return False
        row.completion_tokens = usage.completion_tokens or row.completion_tokens
        if usage.prompt_tokens:
            uncached = usage.prompt_tokens - usage.cached_tokens - usage.stored_tokens
            earlier = ReportedUsage() if self._path != MESSAGES else row
            row.cached_tokens = usage.cached_tokens or earlier.cached_tokens
            row.stored_tokens = usage.stored_tokens or earlier.stored_tokens
            row.stored_1h_tokens = usage.stored_1h_tokens or min(earlier.stored_1h_tokens, row.stored_tokens)
            row.prompt_tokens = uncached + row.cached_tokens + row.stored_tokens
        return usage.completion_tokens > 0
