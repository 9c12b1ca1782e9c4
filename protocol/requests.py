"""OpenAI's chat and text completion requests, decoded and checked.

Unknown fields are errors, except in messages, where they are ignored. OpenAI fields that Updraft does not implement
are errors too, except at the value that has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import msgspec

from .decoding import convert, prepare_types, unsupported
from .errors import InvalidRequestError, UnsupportedFeatureError, invalid_field, invalid_value
from .hints import SWITCHES, Hints, member
from .prompts import Prompt, WirePrompts, prompts_of
from .safety.names import check_names
from .sampling import MAX_LOGPROBS, SamplingParams, check_value
from .structured import (
    Constraint,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
    check_tools,
    checked_source,
    format_constraint,
    function_tools,
    outputs_constraint,
)
from .turns import whole_turns

MAX_PROMPTS = 128  # maximum per completion request
MAX_MESSAGES = 10_000  # maximum per conversation
MAX_ANSWERS = 128  # maximum per prompt, as at OpenAI; checked before allocating memory for answers
_OUTPUTS = ("json_schema", "grammar", "structured_outputs")
_MAX_OPTIONS = 16  # maximum number of chat template variables per request
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VALUE = re.compile(r"[A-Za-z0-9_.,:/ -]{1,64}")  # values of chat template variables: words and dates
_MAX_ID_DIGITS = 10  # maximum digits of a token id
#: Fields that Updraft does not implement. They are accepted with these values, which ask for nothing special.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "store": (False,),
    "verbosity": ("medium",),
}


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # Text, or parts with text or a refusal; None if the assistant only called tools. Other parts are rejected.
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    # Tool calls of the assistant; an empty list becomes None.
    tool_calls: list[ToolCall] | None = None
    # Id of the call that a message with role "tool" answers.
    tool_call_id: str | None = None
    refusal: str | None = None
    # Reasoning. An answer cut off while reasoning has no other content.
    reasoning_content: Any = None
    # vLLM's name for `reasoning_content`, which takes this value if it has none.
    reasoning: Any = None
    # Refused, like `audio`, because dropping an unsupported field would lose content.
    function_call: Any = None
    audio: Any = None

    def __post_init__(self) -> None:
        self.tool_calls = self.tool_calls or None
        self.content = self.content or self.refusal or self.content
        if self.content is None and self.tool_calls is None and (self.reasoning_content or self.reasoning):
            self.content = ""
        self.reasoning_content, self.reasoning = self.reasoning_content or self.reasoning, None

    @property
    def thoughts(self) -> str:
        """Text of the reasoning; empty if the reasoning is missing or is not text."""
        return self.reasoning_content if isinstance(self.reasoning_content, str) else ""

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's predicted output. The router sends the local answer here, as a draft for the cloud to verify."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Stream options. `continuous_usage_stats` (vLLM's, cloud only): report the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


# Signal that measures confidence in a local answer: mean token probability, entropy, or margin over the runner-up.
ConfidenceSignal = Literal["probability", "entropy", "margin"]


class UpdraftOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Per-request router options (`extra_body={"updraft": {...}}`); engines refuse them, the router consumes them."""

    # Target quality as a share of the cloud's, in (0, 1].
    quality: float | None = None
    # Alternative to `quality`: minimum confidence, in (0, 1), for keeping the local answer.
    confidence: float | None = None
    # Signal that is compared with `confidence`; None: the router's setting.
    confidence_signal: ConfidenceSignal | None = None
    # Keep the request on the device.
    private: bool = False
    # Number of local tokens after which streaming starts. None: judge the whole local answer first.
    hold_tokens: int | None = None


class _CommonFields(Hints, forbid_unknown_fields=True, kw_only=True):
    """Fields common to chat and text completion requests."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    repetition_detection: bool = True
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    # Number of candidates to choose `n` answers from. Cloud only.
    best_of: int | None = None
    # vLLM's beam search; refused if true.
    use_beam_search: bool = False
    # Number of alternatives to report per prompt token. Cloud only.
    prompt_logprobs: int | None = None
    # vLLM's: include token ids in each streamed chunk. Cloud only.
    return_token_ids: bool | None = None
    # First tokens of the answer; generation continues after these tokens. Cloud only.
    answer_token_ids: list[int] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Scheduling priority; lower values run first. Cloud only.
    priority: int | None = None
    # Prefix-cache salt: only requests with the same salt share cached prefixes. Cloud only.
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # llama.cpp's: a JSON schema (same as `structured_outputs.json`); `grammar` is a GBNF grammar.
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    updraft: UpdraftOptions | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer, apart from tools. Raises InvalidRequestError if several are set."""
        given = [name for name in _OUTPUTS if getattr(self, name) not in (None, "")]
        if len(given) > 1:
            raise InvalidRequestError(f"{' and '.join(given)} exclude each other: leave one out.", param=given[0])
        if self.grammar:
            return Constraint("gbnf", checked_source(self.grammar, "grammar"), "grammar")
        wanted = self.structured_outputs if self.json_schema is None else StructuredOutputs(json=self.json_schema)
        return None if wanted is None else outputs_constraint(wanted)

    @property
    def running_usage(self) -> bool:
        """Return whether every chunk of the stream reports the usage so far."""
        options = self.stream_options or StreamOptions()
        return options.include_usage and options.continuous_usage_stats

    @property
    def num_answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Number of candidates to choose the answers from."""
        return self.num_answers if self.best_of is None else self.best_of


class ChatRequest(_CommonFields, kw_only=True):
    """Request body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # Variables of the model's chat template, such as `enable_thinking`.
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    store: bool | None = None
    verbosity: str | None = None

    def sampling(self) -> SamplingParams:
        if self.logprobs is not True and self.top_logprobs is not None:
            raise invalid_field("top_logprobs", "top_logprobs needs logprobs=true.")
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return _sampling(self, limit, wanted)

    @property
    def tool_use(self) -> ToolUse | None:
        """Tools that the answer may call; None without tools or if `tool_choice` is "none"."""
        if self.tools is None or self.tool_choice == "none":
            return None
        return ToolUse(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    def constraint(self) -> Constraint | None:
        wanted = None if self.response_format is None else format_constraint(self.response_format)
        outputs = super().constraint()
        if outputs is not None and wanted is not None:
            raise InvalidRequestError(
                f"response_format and {outputs.param} exclude each other: leave one out.", param=outputs.param
            )
        return outputs or wanted


class CompletionRequest(_CommonFields, kw_only=True):
    """Request body of `POST /v1/completions`: completes raw text or token ids, without a chat template."""

    prompt: WirePrompts
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of the request. Raises InvalidRequestError if malformed."""
        return prompts_of(self.prompt, "prompt", at_most=MAX_PROMPTS)

    def sampling(self) -> SamplingParams:
        in_range = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        check_value(in_range, f"logprobs must be between 0 and {MAX_LOGPROBS}", self.logprobs)
        params = _sampling(self, self.max_tokens if self.max_tokens is not None else 16, self.logprobs)
        if not self.echo or self.logprobs is None:
            return params
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))


prepare_types(ChatRequest, CompletionRequest)


def read_chat(fields: Mapping[str, Any]) -> ChatRequest:
    """Check a decoded chat request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = convert(function_tools(whole_turns(fields, has_custom_tools=False)), ChatRequest)
    for name, value in (options := request.chat_template_kwargs or {}).items():
        options[name] = SWITCHES.get(str(value).lower(), value)  # a template would read the text "false" as true
    check_messages(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    check_tools(request.tools or (), request.tool_choice)
    _check_template_options(options)
    if request.tool_use is not None and (given := request.constraint()) and given.kind in ("lark", "gbnf"):
        raise UnsupportedFeatureError(
            "A grammar cannot be combined with tools: leave one out, or set tool_choice to none.", param=given.param
        )
    for field, neutral in _NEUTRAL.items():
        if getattr(request, field) not in (None, *neutral):
            raise unsupported(field)
    if member(request.output_config, "format") is not None:
        raise unsupported("output_config.format")
    _check_shared(request)
    return request


def read_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    """Check a decoded text completion request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = convert(fields, CompletionRequest)
    if request.suffix:  # empty: no effect
        raise unsupported("suffix")
    prompts_of(request.prompt, "prompt", at_most=MAX_PROMPTS)
    _check_shared(request)
    return request


def _check_shared(request: ChatRequest | CompletionRequest) -> None:
    check_names(msgspec.structs.asdict(request))
    if request.use_beam_search:
        raise unsupported("use_beam_search")
    for param, count in (("n", request.n), ("best_of", request.best_of)):
        bound = "at least 1" if (count or 0) < 1 else f"at most {MAX_ANSWERS}"  # a server may allow fewer
        check_value(count is None or 1 <= count <= MAX_ANSWERS, f"{param} must be {bound}", count)
    check_value(-(2**63) <= (request.priority or 0) < 2**63, "priority must be a 64-bit integer", request.priority)
    _check_candidates(request)
    _check_given_answer(request)
    if request.stream_options is not None and not request.stream:
        raise invalid_field("stream_options", "stream_options needs stream=true.")
    if request.updraft is not None and request.updraft.quality is not None and not 0 < request.updraft.quality <= 1:
        raise InvalidRequestError("updraft.quality must be above 0 and at most 1.", param="updraft.quality")
    request.sampling()
    request.constraint()


def check_message_count(count: int) -> None:
    """Check the number of messages. Raises InvalidRequestError above the limit."""
    if count > MAX_MESSAGES:
        raise invalid_field("messages", f"messages holds {count} messages; the limit is {MAX_MESSAGES}: send fewer.")


def check_messages(messages: list[Message], *, add_generation_prompt: bool, continue_final_message: bool) -> None:
    """Check roles, tool calls and continuation options of messages. Raises InvalidRequestError."""
    if not messages:
        raise invalid_field("messages", "messages must hold at least one message.")
    check_message_count(len(messages))
    if continue_final_message and (messages[-1].role != "assistant" or add_generation_prompt):
        fault = "continue_final_message needs add_generation_prompt=false."
        if messages[-1].role != "assistant":
            fault = "continue_final_message needs the last message to be from the assistant."
        raise InvalidRequestError(fault, param="continue_final_message")
    for index, message in enumerate(messages):
        for field in ("function_call", "audio"):
            if getattr(message, field) is not None:
                raise unsupported(f"messages[{index}].{field}")
        calls = message.tool_calls is not None
        if calls and message.role != "assistant":
            fault = "only assistant messages may have tool_calls: leave tool_calls out"
        elif message.tool_call_id is None and message.role == "tool":
            fault = "the tool result answers no call of an earlier assistant message: give its tool_call_id"
        elif message.tool_call_id is not None and message.role != "tool":
            fault = "only tool messages may have a tool_call_id: leave it out"
        elif message.content is None and not calls:
            fault = "content is missing"
        else:
            continue
        raise invalid_value(f"messages[{index}]", fault)


def _check_template_options(options: Mapping[str, Any]) -> None:
    """Allow only words and dates, because a template may insert a value into the prompt as control tokens."""
    values = [value for value in options.values() if isinstance(value, str)]
    if len(options) > _MAX_OPTIONS or not (all(map(_NAME.fullmatch, options)) and all(map(_VALUE.fullmatch, values))):
        raise invalid_field(
            "chat_template_kwargs",
            f"chat_template_kwargs takes at most {_MAX_OPTIONS} variables. Values must be true, false, numbers, words "
            "or dates of up to 64 letters, digits, spaces and '_.,:/-'.",
        )


def _check_candidates(request: ChatRequest | CompletionRequest) -> None:
    """Refuse to stream answers that are only chosen at the end, and refuse options without effect."""
    chosen = request.num_candidates > request.num_answers
    faults = [
        ("best_of", request.num_candidates < request.num_answers, "the value must be at least n"),
        ("best_of", chosen and request.stream, "answers are chosen at the end: leave out stream or best_of"),
        ("prompt_logprobs", request.prompt_logprobs is not None and request.stream, "not available with stream=true"),
    ]
    for param, wrong, why in faults:
        if wrong:
            raise invalid_value(param, why)


def _check_given_answer(request: ChatRequest | CompletionRequest) -> None:
    """Refuse `answer_token_ids` together with options that also determine how the answer begins."""
    if request.answer_token_ids is None:
        return
    several = request.num_candidates > 1 or (isinstance(request, CompletionRequest) and len(request.prompts) > 1)
    faults = [
        (several, "only a single answer can be continued"),
        (request.constraint() is not None, "an answer with a required format cannot be continued"),
        (isinstance(request, CompletionRequest) and request.echo, "leave out echo"),
        (isinstance(request, ChatRequest) and request.tool_use is not None, "leave out tools"),
    ]
    for wrong, why in faults:
        if wrong:
            raise invalid_value("answer_token_ids", why)


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Build sampling parameters. As on other servers, `top_p` 0 means greedy and `top_k` -1 means off."""
    given = {field.name: getattr(request, field.name) for field in fields(SamplingParams)}
    changed: dict[str, Any] = {
        "max_tokens": max_tokens,
        "logit_bias": _logit_bias(request.logit_bias or {}),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "stop": (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        "logprobs": logprobs,
    }
    if request.top_p == 0:
        changed |= {"top_p": 1.0, "top_k": 1}
    elif request.top_k == -1:
        changed["top_k"] = 0
    return SamplingParams(**{name: value for name, value in (given | changed).items() if value is not None})


def _logit_bias(raw: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Parse token ids from JSON keys. The length limit avoids slow parsing of very long numbers."""
    biases: dict[int, float] = {}
    for key, bias in raw.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            fault = f"logit_bias must map token ids to numbers; {key[:40]!r} is not a token id."
            raise invalid_field("logit_bias", fault)
        if int(key) in biases:
            raise invalid_field("logit_bias", f"logit_bias contains token {int(key)} twice.")
        biases[int(key)] = bias
    return tuple(biases.items())
