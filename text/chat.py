"""Rendering of chat templates to prompt text, with the origin (template or user) of every character.

A template is a Jinja program shipped with a model. It writes control tokens (`<|im_end|>`) around users' text. A user
who types `<|im_end|>` must not end a turn. `ChatTemplate.segments` therefore separates template text from user text,
and `encoding_runs` converts the segments to pieces in which a tokenizer may or may not recognize control tokens.

To find origins, the template is rendered twice: once with the real messages, and once with every character of every
user string replaced by a stand-in from Unicode's supplementary private planes. Stand-ins in the second output are user
text, even if the template moved, trimmed, cut or repeated them. Mapped back, both outputs must be equal. Otherwise the
template inspected the content (Qwen's `'</think>' in content`, `tojson`), and these rules decide:

1. If the special tokens of the real output equal, in order, those that the template wrote in the second output, then
   no special token came from a user, and the real output is used.
2. Otherwise the second output is used: user text stays unchanged, and the template's changes to user text are lost.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Unpack

import msgspec

from ..protocol.errors import InvalidRequestError, invalid_field
from ..protocol.requests import Message
from ..protocol.safety.bounded_cache import BoundedCache
from ..protocol.structured import RenderOptions
from .templates import tool_messages as tool_turns
from .templates.conversation import END_MARK, Conversation, Probe, TemplateFit, first_missing
from .templates.effort import effort_variables
from .templates.reasoning import ReasoningStyle
from .templates.renderer import Renderer, RenderLimits, encoded
from .templates.sources import TemplateSources
from .templates.tool_messages import Change

_FIRST_PRIVATE = 0xF0000
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]+")
_MAX_ALPHABET = 0x10FFFD - _FIRST_PRIVATE  # maximum number of stand-ins; U+10FFFE is END_MARK
_MAX_SHAPES = 256  # maximum number of conversation shapes whose `TemplateFit` is cached


@dataclass(frozen=True, slots=True)
class Segment:
    """Piece of prompt text. `is_control`: the template wrote the text, so special tokens in the text are recognized."""

    text: str
    is_control: bool


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Token ids of a rendered chat, and the style of the reasoning before the answer."""

    ids: list[int]
    reasoning: ReasoningStyle | None


class ChatTemplate:
    """A model's chat template, rendered in a child process that starts at the first use.

    `special_tokens` are the tokenizer's control tokens, which users must not be able to write.

    No text of a request is lost: the template first renders a conversation of the same shape with a unique marker for
    each text. If the template drops a marker or fails, the conversation is adapted (see `Conversation.fits`).
    """

    def __init__(
        self,
        source: str | TemplateSources,
        *,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Iterable[str] = (),
    ) -> None:
        """Set up the template without compiling it. Raises ModelLoadError if the source is too long."""
        sources = source if isinstance(source, TemplateSources) else TemplateSources(source)
        self.source, self.tool_source = sources.default, sources.tool_use or sources.default
        self._tool_style = sources.tool_style
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special = special_pattern({bos_token, eos_token, *special_tokens})
        self._renderers = [Renderer(each, RenderLimits()) for each in dict.fromkeys([self.source, self.tool_source])]
        self._fits: BoundedCache[bytes, TemplateFit] = BoundedCache(_MAX_SHAPES)  # by hash of the conversation's shape

    def effort_variables(self, effort: str | None) -> dict[str, Any]:
        """Return the template variables that set a reasoning effort; empty if the template has no such variable."""
        return effort_variables(self.source + self.tool_source, effort)

    def compile(self) -> None:
        """Start the child process now and compile the template. Raises ModelLoadError if the template is invalid."""
        for renderer in self._renderers:
            renderer.compile()

    def close(self) -> None:
        """End the child process; the next use starts a new process."""
        for renderer in self._renderers:
            renderer.close()

    def render(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> str:
        """Render the prompt text. With `continue_final_message`, the prompt ends at the end of the last message.

        Raises InvalidRequestError if the template refuses the messages (wrong roles or order), drops a message, or
        exceeds its limits of time and memory; ModelLoadError if the template is invalid.
        """
        return _text(self.segments(messages, **options))

    def segments(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[Segment]:
        """Render the prompt as segments of template text and of user text. Raises like `render`."""
        return self.rendered(messages, **options)[0]

    def rendered(
        self, messages: Sequence[Message], **options: Unpack[RenderOptions]
    ) -> tuple[list[Segment], ReasoningStyle | None]:
        """Return the segments and the style of the reasoning before the answer, if any. Raises like `render`."""
        requested = _conversation(messages, options)
        fit = self._fit(requested)
        conversation = requested.put(fit, self._tool_style)
        character_map = _CharacterMap(conversation)
        truth, opaque = self._rendered(conversation, fit, [_unchanged, character_map.whole])
        segments = self._origins(conversation, fit, character_map, truth, opaque)
        if first_missing(requested.messages, _text(segments)) is not None:
            segments = _cut(opaque, character_map)  # the template drops real contents, but not stand-ins
        if place := first_missing(requested.messages, _text(segments)):
            raise _dropped_text_error(place)
        if requested.is_open:
            end = conversation.messages[-1].text
        else:  # the template's text after the last user text, or the last line if this text depends on the contents
            end, text = _PRIVATE.split(opaque)[-1], _text(segments)
            end = end if text.endswith(end) else text.rstrip().rpartition("\n")[2]
        return segments, ReasoningStyle.of(self.source + self.tool_source, end)

    def _origins(
        self, conversation: Conversation, fit: TemplateFit, character_map: _CharacterMap, truth: str, opaque: str
    ) -> list[Segment]:
        if character_map.undo(opaque) == truth:
            return _cut(opaque, character_map)
        # This time, do not replace the whitespace around each text, because the template may trim it.
        (opaque,) = self._rendered(conversation, fit, [character_map.inside])
        if character_map.undo(opaque) == truth:
            return _cut(opaque, character_map)
        if self._special is not None:
            own = [token for part in _PRIVATE.split(opaque) for token in self._special.findall(part)]
            if self._special.findall(truth) == own:
                return [Segment(truth, True)]
        return _cut(opaque, character_map)

    def _fit(self, requested: Conversation) -> TemplateFit:
        """Return the first adaptation that keeps every text. Cached for conversations that differ only in texts."""
        probe = Probe.of(requested)
        shape = hashlib.sha256(encoded(probe.conversation.context(_unchanged))).digest()
        return self._fits.find(shape, lambda _: self._tried(probe))

    def _tried(self, probe: Probe) -> TemplateFit:
        """Return the first adaptation with which the template keeps every text. If all fail, raises the first error."""
        several = len(self._renderers) > 1
        fits = list(probe.conversation.fits(tool_template=several, has_developer="developer" in self.source))
        error: InvalidRequestError | None = None
        for _, some in itertools.groupby(fits, lambda fit: (fit == fits[0], replace(fit, level="as_is"))):
            group = list(some)  # these adaptations differ only in roles, so one request to the child tries all of them
            conversations = [probe.conversation.put(fit, self._tool_style) for fit in group]
            contexts = [each.context(_unchanged) | self._tokens for each in conversations]
            attempts = self._renderers[group[0].tool_template].attempt(contexts)
            for fit, attempt in zip(group, attempts, strict=True):
                lost = attempt.failure is None and probe.missing(attempt.text)
                if attempt.failure is None and not lost:
                    return fit
                error = error or (_dropped_text_error(lost) if lost else attempt.error)
        assert error is not None
        raise error

    def _rendered(self, conversation: Conversation, fit: TemplateFit, changes: Sequence[Change]) -> list[str]:
        contexts = [conversation.context(change) | self._tokens for change in changes]
        texts = self._renderers[fit.tool_template].render(contexts)
        return [_render_to_mark(text) if conversation.is_open else text for text in texts]


def _conversation(messages: Sequence[Message], options: RenderOptions) -> Conversation:
    """Build the conversation. Raises InvalidRequestError if the last message cannot be continued."""
    is_open = options.get("continue_final_message", False)
    variables = {"date_string": f"{date.today():%d %b %Y}", **(options.get("template_options") or {})}
    if is_open and (not messages or messages[-1].role != "assistant"):
        raise InvalidRequestError(
            "continue_final_message needs the last message to be from the assistant.", param="continue_final_message"
        )
    if is_open and messages[-1].tool_calls:
        fault = "A message with tool_calls cannot be continued: leave out tool_calls, or continue_final_message."
        raise invalid_field(f"messages[{len(messages) - 1}].tool_calls", fault)
    if is_open:
        last = msgspec.structs.replace(messages[-1], content=messages[-1].text + END_MARK)
        messages = [*messages[:-1], last]
    asks = not is_open and options.get("add_generation_prompt", True)
    return Conversation(messages, options.get("tools", ()), asks, is_open, options=variables)


def _render_to_mark(text: str) -> str:
    """Return the rendered text up to END_MARK, the end of the last message."""
    prompt, mark, _ = text.rpartition(END_MARK)
    if not mark:
        raise InvalidRequestError(
            "The last message cannot be continued: this model's chat template drops or changes its end.",
            param="continue_final_message",
        )
    return prompt


def _dropped_text_error(place: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model's chat template drops the text of {place}: use another role for this message, or set another "
        "template with --chat-template.",
        param=place,
        code="unsupported_message",
    )


def _text(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of `tokens`, longest first; None without tokens."""
    ordered = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def encoding_runs(segments: Sequence[Segment], special: re.Pattern[str] | None) -> list[Segment]:
    """Return the pieces to tokenize separately; special tokens are recognized only in control pieces.

    If no user typed a special token, the result is a single piece, so that merges across template and user text are
    the same as in transformers. Otherwise the text is split at the template's special tokens, as in tokenizers.
    """
    parts = itertools.groupby(segments, lambda segment: segment.is_control)
    merged = [Segment(_text(part), is_control) for is_control, part in parts]
    text = _text(merged)
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


class _CharacterMap:
    """One-to-one map from the characters of user strings to private code points, and back."""

    def __init__(self, conversation: Conversation) -> None:
        texts = [text for message in conversation.messages for text in (message.text, message.name or "")]
        alphabet = sorted(set().union(*texts, *tool_turns.texts(conversation.messages, conversation.tools)))
        if len(alphabet) > _MAX_ALPHABET:
            raise InvalidRequestError(
                f"The messages use {len(alphabet)} different characters; at most {_MAX_ALPHABET} are supported.",
                param="messages",
            )
        self._to = {ord(char): _FIRST_PRIVATE + index for index, char in enumerate(alphabet)}
        self._back = {character_map: code for code, character_map in self._to.items()}

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


def _cut(opaque: str, character_map: _CharacterMap) -> list[Segment]:
    segments: list[Segment] = []
    end = 0
    for match in _PRIVATE.finditer(opaque):
        segments += [Segment(opaque[end : match.start()], True), Segment(character_map.undo(match.group()), False)]
        end = match.end()
    segments.append(Segment(opaque[end:], True))
    return [segment for segment in segments if segment.text]


def _unchanged(text: str) -> str:
    return text
