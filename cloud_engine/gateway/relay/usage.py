"""Usage of a request, from the bytes of its answer: the last count, also where the answer broke off.

Nothing within a stream is decoded: quotes inside of texts are escaped, so that these patterns find fields alone.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from ....accounting.token_estimate import prompt_tokens
from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.responses import MAX_TOKENS
from ..ledger.metering import UsageRow

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_NO_USAGE = b',"usage":null'  # on every chunk but the last, where usage was asked for
_RUNNING = re.compile(rb',\s?"usage":\s?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_WRITTEN = re.compile(rb'"completion_tokens":\s?(\d{1,12})')
_NO_CHOICES = re.compile(rb'"choices":\s?\[\]')
_TEXT = re.compile(
    rb'"(?:content|text|thinking|arguments|reasoning|reasoning_content|refusal|delta|partial_json)":'
    rb'\s*"((?:[^"\\]|\\.)*+)"'
)


class UsageOptions(msgspec.Struct):
    """The usage that the client asked for: none, that of the whole answer, or also that of every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False

    @property
    def wants_running(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class _Details(msgspec.Struct):
    accepted_prediction_tokens: Count | None = 0
    rejected_prediction_tokens: Count | None = 0


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: _Details | None = None


class _UsagePeek(msgspec.Struct):
    usage: _Usage | None = None


prepare_types(_UsagePeek)


class StreamMeter:
    """Writes into `row` what one stream costs, and leaves out of its events what the client has not asked for.

    `running`: whether the node was asked to put the usage so far on every chunk. Where a stream breaks off, that is
    what it cost; without it, as many tokens as chunks had text: a chunk may hold several, so it is the least.
    """

    def __init__(self, row: UsageRow, asked: UsageOptions, *, running: bool, begun: int = 0) -> None:
        """`begun`: tokens that other nodes have written of this answer."""
        self._row = row
        self._asked = asked
        self._hides_running = running and not asked.wants_running
        self._running = b""
        self._texts = begun
        self._is_reported = False

    def shown(self, event: bytes, *, has_text: bool) -> bytes | None:
        """`event` as the client is to see it; None if it was for the meter alone."""
        if (at := event.find(b'"usage"')) >= 0:
            if _NO_CHOICES.search(event) and read_usage(event[5:], self._row):
                self._is_reported = True
                return event if self._asked.include_usage else None
            if found := _RUNNING.search(event, max(at - 2, 0)):
                self._running = found[1]
                return self._without(found[0], event) if self._hides_running else event
        self._texts += has_text
        return event if self._asked.include_usage else event.replace(_NO_USAGE, b"")

    @property
    def written(self) -> tuple[int, bool]:
        """Tokens of the answer so far, and whether the node counted them."""
        counted = _WRITTEN.search(self._running)
        return (self._texts, False) if counted is None else (int(counted[1]), True)

    @property
    def is_reported(self) -> bool:
        """Whether the usage of the whole answer has come."""
        return self._is_reported

    def settle(self) -> None:
        """The stream is over, at its end or before."""
        if not self._is_reported and not (self._running and read_usage(b'{"usage":%b}' % self._running, self._row)):
            self._row.completion_tokens = self._texts

    def _without(self, usage: bytes, event: bytes) -> bytes:
        return event.replace(usage, _NO_USAGE if self._asked.include_usage else b"")


def asking_for_usage(body: bytes, *, running: bool, tokens: bool = False) -> bytes:
    """A stream's request, so that its usage is told at the end, and on every chunk if `running`.

    `tokens`: each chunk is to have its tokens too.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    options = msgspec.json.decode(fields.get("stream_options", b"null"), type=dict[str, msgspec.Raw] | None) or {}
    options |= {"include_usage": msgspec.Raw(b"true"), "continuous_usage_stats": msgspec.Raw(b"true")}
    if not running:
        del options["continuous_usage_stats"]  # servers may refuse what they do not know
    if tokens:
        fields["return_token_ids"] = msgspec.Raw(b"true")
    return msgspec.json.encode({**fields, "stream_options": options})


def meter_whole(body: bytes, row: UsageRow) -> None:
    """Note the usage of a whole answer in `row`: what the node says, else what the texts of its choices suggest."""
    if not read_usage(body, row) and b'"choices"' in body:
        row.completion_tokens = estimated_tokens(body)


def estimated_tokens(answer: bytes) -> int:
    """Of an answer that comes without usage, from the bytes of its texts."""
    return sum(map(prompt_tokens, _TEXT.findall(answer)))


def num_text_bytes(event: bytes) -> int:
    """The bytes of all texts in an event of a stream."""
    return sum(map(len, _TEXT.findall(event)))


def read_usage(payload: bytes, row: UsageRow) -> bool:
    """Note the usage in `payload`; False if there is none, or one that cannot be."""
    try:
        usage = msgspec.json.decode(payload, type=_UsagePeek).usage
    except UNREADABLE:  # not ours to judge: the client gets it as it is
        return False
    if usage is None:
        return False
    details = usage.completion_tokens_details or _Details()
    row.prompt_tokens, row.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    row.cached_tokens = (usage.prompt_tokens_details or PromptDetails()).cached_tokens or 0
    row.accepted_prediction_tokens = details.accepted_prediction_tokens or 0
    row.rejected_prediction_tokens = details.rejected_prediction_tokens or 0
    return True
