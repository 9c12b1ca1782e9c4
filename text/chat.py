"""Chat templates: messages to prompt text, with the origin of every character known.

A template is a Jinja program shipped with a model. It writes control tokens (`<|im_end|>`) around what users wrote;
a user who types `<|im_end|>` must not thereby end a turn. `ChatTemplate.segments` therefore tells template text from
user text, and `encoding_runs` turns that into the pieces a tokenizer may or may not read control tokens in.

How origins are found: the template is rendered twice, once with the real messages and once with every character of
every user string replaced by a stand-in from Unicode's supplementary private planes. Stand-ins in the second output
are user text, wherever the template put, trimmed, cut or repeated them. Mapped back, both outputs must be equal. If
they are not, the template looked *into* the content (Qwen's `'</think>' in content`, `tojson`), and one rule decides:

1. If the special tokens of the real output are, in order, those the template wrote in the second one, then none
   came from a user: the real output is used whole.
2. Otherwise the second output is used: user text stays as written and the template's rewriting of it is skipped.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from ..protocol.errors import InvalidRequestError
from ..protocol.requests import Message
from ..protocol.safety.bounded_cache import BoundedCache
from ..protocol.structured import RenderOptions
from .templates import tool_messages as tool_turns
from .templates.conversation import END_MARK, Conversation, Fit, Probe, first_missing
from .templates.renderer import Renderer, RenderLimits, encoded
from .templates.sources import TemplateSources
from .templates.tool_messages import Change

_FIRST_STAND_IN = 0xF0000
_STAND_INS = re.compile("[\U000f0000-\U0010fffd]+")
_MAX_ALPHABET = 0x10FFFD - _FIRST_STAND_IN  # the last code point marks the end of a continued message
_MAX_SHAPES = 256  # of conversations that are remembered


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of prompt text. `is_control`: written by the template, so special tokens in it are real."""

    text: str
    is_control: bool


class ChatTemplate:
    """A model's chat template, rendered in a child process that starts with the first use.

    `special_tokens` are the tokenizer's control tokens; they are only needed to decide rule 1 above.

    No text of a request is lost: the template first renders a conversation of the same shape, in which each text is a
    mark. Where it drops one, or refuses, the conversation is put to it in other ways, as `Conversation.fits` says.
    """

    def __init__(
        self,
        source: str | TemplateSources,
        *,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Iterable[str] = (),
    ) -> None:
        """Raises ModelLoadError for a source that is longer than any template is."""
        sources = source if isinstance(source, TemplateSources) else TemplateSources(source)
        self.source, self.tool_source = sources.default, sources.tool_use or sources.default
        self._tool_style = sources.tool_style
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special = special_pattern({bos_token, eos_token, *special_tokens})
        self._renderers = [Renderer(each, RenderLimits()) for each in dict.fromkeys([self.source, self.tool_source])]
        self._fits: BoundedCache[bytes, Fit] = BoundedCache(_MAX_SHAPES)  # by the shape of the conversation

    def compile(self) -> None:
        """Start the child process now, with the template. Raises ModelLoadError if that is not valid."""
        for renderer in self._renderers:
            renderer.compile()

    def close(self) -> None:
        """End the child process. A later use starts another one."""
        for renderer in self._renderers:
            renderer.close()

    def render(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> str:
        """The prompt text. With `continue_final_message` it ends exactly where the last message's content ends.

        Raises InvalidRequestError where the template refuses the messages (wrong roles, wrong order), leaves one out,
        or takes too long or too much memory; ModelLoadError if it is not valid.
        """
        return _text(self.segments(messages, **options))

    def segments(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[Segment]:
        """The prompt text cut by origin; neighbours differ in `is_control`. Raises as `render` does."""
        requested = _conversation(messages, options)
        fit = self._fit(requested)
        conversation = requested.put(fit, self._tool_style)
        stand_in = _StandIn(conversation)
        truth, opaque = self._rendered(conversation, fit, [_unchanged, stand_in.whole])
        segments = self._origins(conversation, fit, stand_in, truth, opaque)
        if first_missing(requested.messages, _text(segments)) is not None:
            segments = _cut(opaque, stand_in)  # the template looked into a text to drop it
        if place := first_missing(requested.messages, _text(segments)):
            raise _left_out(place)
        return segments

    def _origins(
        self, conversation: Conversation, fit: Fit, stand_in: _StandIn, truth: str, opaque: str
    ) -> list[Segment]:
        if stand_in.undo(opaque) == truth:
            return _cut(opaque, stand_in)
        (opaque,) = self._rendered(
            conversation, fit, [stand_in.inside]
        )  # leaves outer whitespace for templates that trim
        if stand_in.undo(opaque) == truth:
            return _cut(opaque, stand_in)
        if self._special is not None:
            own = [token for part in _STAND_INS.split(opaque) for token in self._special.findall(part)]
            if self._special.findall(truth) == own:
                return [Segment(truth, True)]
        return _cut(opaque, stand_in)

    def _fit(self, requested: Conversation) -> Fit:
        """The first way in which the template keeps every text of a conversation of this shape."""
        probe = Probe.of(requested)
        shape = hashlib.sha256(encoded(probe.conversation.context(_unchanged))).digest()
        return self._fits.find(shape, lambda _: self._tried(probe))

    def _tried(self, probe: Probe) -> Fit:
        """Raises the first way's error if there is none."""
        several = len(self._renderers) > 1
        fits = list(probe.conversation.fits(tool_template=several, has_developer="developer" in self.source))
        error: InvalidRequestError | None = None
        for _, some in itertools.groupby(fits, lambda fit: (fit == fits[0], replace(fit, level="as_is"))):
            group = list(some)  # which differ in what is done to the roles
            conversations = [probe.conversation.put(fit, self._tool_style) for fit in group]
            contexts = [each.context(_unchanged) | self._tokens for each in conversations]
            attempts = self._renderers[group[0].tool_template].attempt(contexts)
            for fit, attempt in zip(group, attempts, strict=True):
                lost = attempt.failure is None and probe.missing(attempt.text)
                if attempt.failure is None and not lost:
                    return fit
                error = error or (_left_out(lost) if lost else attempt.error)
        assert error is not None
        raise error

    def _rendered(self, conversation: Conversation, fit: Fit, changes: Sequence[Change]) -> list[str]:
        contexts = [conversation.context(change) | self._tokens for change in changes]
        texts = self._renderers[fit.tool_template].render(contexts)
        return [_up_to_mark(text) if conversation.is_open else text for text in texts]


def _conversation(messages: Sequence[Message], options: RenderOptions) -> Conversation:
    """Raises InvalidRequestError for a last message that cannot go on."""
    tools, variables = options.get("tools", ()), options.get("template_options") or {}
    if not options.get("continue_final_message", False):
        asks = options.get("add_generation_prompt", True)
        return Conversation(messages, tools, asks, is_open=False, options=variables)
    if not messages or messages[-1].role != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs the last message to be from the assistant.", param="continue_final_message"
        )
    if messages[-1].tool_calls:
        raise InvalidRequestError(
            "A message with tool_calls is complete: leave out its tool_calls, or continue_final_message.",
            param=f"messages[{len(messages) - 1}].tool_calls",
            code="invalid_value",
        )
    last = Message(role="assistant", content=messages[-1].text + END_MARK, name=messages[-1].name)
    return Conversation([*messages[:-1], last], tools, False, is_open=True, options=variables)


def _up_to_mark(text: str) -> str:
    """The rendered text, up to the end of the last message."""
    prompt, found, _ = text.rpartition(END_MARK)
    if not found:
        raise InvalidRequestError(
            "This model's chat template does not keep the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return prompt


def _left_out(place: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model's chat template leaves out the text of {place}: send it in another role, or give another template "
        "with --chat-template.",
        param=place,
        code="unsupported_message",
    )


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of `tokens`, longest first; None for no tokens."""
    ordered = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def encoding_runs(segments: Sequence[Segment], special: re.Pattern[str] | None) -> list[Segment]:
    """The pieces to tokenize one by one: special tokens are to be recognised in control pieces only.

    Where no user typed a special token that is one single piece, so that merges across the border of template and user
    text come out as in transformers. Otherwise the text is cut at the template's own special tokens, as tokenizers do.
    """
    merged = _merge(segments)
    text = "".join(segment.text for segment in merged)
    if special is None:
        return [Segment(text, False)] if text else []
    own: list[tuple[int, int]] = []
    start = 0
    for segment in merged:
        if segment.is_control:
            own += [(start + match.start(), start + match.end()) for match in special.finditer(segment.text)]
        start += len(segment.text)
    if own == [match.span() for match in special.finditer(text)]:
        return [Segment(text, True)] if text else []
    runs: list[Segment] = []
    end = 0
    for first, last in own:
        runs += [Segment(text[end:first], False), Segment(text[first:last], True)]
        end = last
    runs.append(Segment(text[end:], False))
    return [run for run in runs if run.text]


class _StandIn:
    """A one-to-one map from the characters of the messages' user strings to private code points, and back."""

    def __init__(self, conversation: Conversation) -> None:
        texts = [text for message in conversation.messages for text in (message.text, message.name or "")]
        alphabet = sorted(set().union(*texts, *tool_turns.texts(conversation.messages, conversation.tools)))
        if len(alphabet) > _MAX_ALPHABET:
            raise InvalidRequestError(
                f"The messages use {len(alphabet)} different characters; at most {_MAX_ALPHABET} are supported.",
                param="messages",
            )
        self._to = {ord(char): _FIRST_STAND_IN + index for index, char in enumerate(alphabet)}
        self._back = {stand_in: code for code, stand_in in self._to.items()}

    def whole(self, text: str) -> str:
        return text.translate(self._to)

    def inside(self, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return text[:start] + core.translate(self._to) + text[start + len(core) :]

    def undo(self, text: str) -> str:
        return text.translate(self._back)


def _cut(opaque: str, stand_in: _StandIn) -> list[Segment]:
    segments: list[Segment] = []
    end = 0
    for match in _STAND_INS.finditer(opaque):
        segments += [Segment(opaque[end : match.start()], True), Segment(stand_in.undo(match.group()), False)]
        end = match.end()
    segments.append(Segment(opaque[end:], True))
    return [segment for segment in segments if segment.text]


def _merge(segments: Sequence[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].is_control == segment.is_control:
            merged[-1] = Segment(merged[-1].text + segment.text, segment.is_control)
        else:
            merged.append(segment)
    return merged


def _unchanged(text: str) -> str:
    return text
