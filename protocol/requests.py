"""What a client may ask: OpenAI's chat and text completion requests, decoded and checked.

Unknown fields are refused. Fields of the OpenAI surface that no engine of ours implements yet are accepted only at the
value that changes nothing; anything else is an `UnsupportedFeatureError` naming the field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

import msgspec

from .errors import InvalidRequestError, UnsupportedFeatureError
from .flags import Flag, WithFlags
from .prompts import Prompt, WirePrompts, prompts_of
from .safety.names import check_names
from .sampling import MOST_LOGPROBS, SamplingParams
from .structured import (
    Constraint,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
    check_tools,
    format_constraint,
    outputs_constraint,
)

MAX_PROMPTS = 128  # of one completion request
MOST_ANSWERS = 128  # to one prompt: OpenAI's own limit, checked before anything is sized by it
_MOST_ID_DIGITS = 10  # of a token id


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. `content` may be a string or a list of text parts; other part types are refused.

    An assistant that called tools may have said nothing else (`content` None); the role "tool" carries what a call
    with `tool_call_id` gave. `refusal` is there because clients send our own messages back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's predicted output: here, the local answer going up as the draft to verify."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(WithFlags, forbid_unknown_fields=True):
    """`continuous_usage_stats` (vLLM's, for the cloud alone): with `include_usage`, each chunk has the usage so far."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class UpdraftOptions(WithFlags, forbid_unknown_fields=True):
    """Per-request router options (`extra_body={"updraft": {...}}`); engines refuse them, the router consumes them."""

    # Share of the cloud's quality to keep, in (0, 1].
    quality: float | None = None
    # Instead of a quality: the local answer stays if its geometric mean token probability reaches this, in (0, 1).
    confidence: float | None = None
    # Never leave the device.
    private: Flag = False
    # Stream after this many local tokens instead of after the whole local answer was judged.
    hold_tokens: int | None = None


class _Shared(WithFlags, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of requests may ask.

    For the cloud alone: `priority` (lower goes first), `cache_salt` (who shares cached prefixes), `prompt_logprobs`
    (alternatives per token of the prompt), `best_of` (answers to choose `n` from), and `use_beam_search`, with as many
    beams as `best_of` or `n` says, ranked by log-probability / length ** `length_penalty`.
    """

    model: str
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: Flag = False
    repetition_detection: Flag = True
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: Flag = False
    length_penalty: float | None = None
    prompt_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    updraft: UpdraftOptions | None = None

    @property
    def running_usage(self) -> bool:
        """Whether each chunk of the stream is to say what the answer has cost so far."""
        options = self.stream_options or StreamOptions()
        return options.include_usage and options.continuous_usage_stats

    @property
    def num_answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Answers or beams to choose the answers from."""
        return self.num_answers if self.best_of is None else self.best_of


class ChatRequest(_Shared, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self) -> SamplingParams:
        if self.logprobs is not True and self.top_logprobs is not None:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs", code="invalid_value")
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return _sampling(self, limit, wanted)

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None for none, also where the choice is "none"."""
        if self.tools is None or self.tool_choice == "none":
            return None
        return ToolUse(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    def constraint(self) -> Constraint | None:
        """What the answer must look like, tools aside. Raises InvalidRequestError."""
        wanted = None if self.response_format is None else format_constraint(self.response_format)
        if self.structured_outputs is None:
            return wanted
        if wanted is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs exclude each other: leave one out.", param="structured_outputs"
            )
        return outputs_constraint(self.structured_outputs)


class CompletionRequest(_Shared, kw_only=True):
    """`POST /v1/completions`: raw text or tokens in, raw text out, no chat template."""

    prompt: WirePrompts
    logprobs: int | None = None
    echo: Flag = False
    suffix: str | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Raises InvalidRequestError."""
        return prompts_of(self.prompt, "prompt", at_most=MAX_PROMPTS)

    def sampling(self) -> SamplingParams:
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InvalidRequestError(
                f"logprobs must be between 0 and {MOST_LOGPROBS}, got {self.logprobs}.",
                param="logprobs",
                code="invalid_value",
            )
        params = _sampling(self, self.max_tokens if self.max_tokens is not None else 16, self.logprobs)
        if not self.echo or self.logprobs is None:
            return params
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def constraint(self) -> Constraint | None:
        """What the answer must look like. Raises InvalidRequestError."""
        return None if self.structured_outputs is None else outputs_constraint(self.structured_outputs)


R = TypeVar("R")


def parse_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat request. Raises InvalidRequestError or UnsupportedFeatureError, never anything else."""
    request = decode(body, ChatRequest)
    check_messages(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    check_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if request.tools and request.tool_choice != "none" and request.constraint() is not None:
        raise UnsupportedFeatureError(
            "tools and a format for the answer exclude each other here: leave one out, or set tool_choice to none.",
            param="tools",
        )
    _refuse_unless(request.modalities in (None, ["text"]), "modalities")
    _check_shared(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode and check a text completion request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = decode(body, CompletionRequest)
    _refuse(request, "suffix")
    prompts_of(request.prompt, "prompt", at_most=MAX_PROMPTS)
    _check_shared(request)
    return request


def decode(body: bytes, kind: type[R]) -> R:
    """JSON as a struct. Raises InvalidRequestError naming the field that does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"Invalid request: {error}", param=_param_of(str(error)), code="invalid_value"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}", code="invalid_json") from error


def _param_of(message: str) -> str | None:
    """The field a msgspec message is about: from ``- at `$.messages[0].role` `` or ``unknown field `x` ``."""
    for opening in ("at `$.", "field `"):
        _, found, rest = message.partition(opening)
        if found:
            return rest.partition("`")[0]
    return None


def _check_shared(request: ChatRequest | CompletionRequest) -> None:
    check_names(msgspec.structs.asdict(request))
    for param, count in (("n", request.n), ("best_of", request.best_of)):
        if count is not None and not 1 <= count <= MOST_ANSWERS:
            bound = "at least 1" if count < 1 else f"at most {MOST_ANSWERS}"  # a server may have a lower one of its own
            raise InvalidRequestError(f"{param} must be {bound}, got {count}.", param=param, code="invalid_value")
    if request.priority is not None and not -(2**63) <= request.priority < 2**63:
        raise InvalidRequestError(
            f"priority must be a 64-bit integer, got {request.priority}.", param="priority", code="invalid_value"
        )
    _check_candidates(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options", code="invalid_value")
    if request.updraft is not None and request.updraft.quality is not None and not 0 < request.updraft.quality <= 1:
        raise InvalidRequestError("updraft.quality must be above 0 and at most 1.", param="updraft.quality")
    request.sampling()
    request.constraint()


def check_messages(messages: list[Message], *, add_generation_prompt: bool, continue_final_message: bool) -> None:
    """Raises InvalidRequestError for turns that cannot be, or that cannot go on as is asked."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages", code="invalid_value")
    if continue_final_message:
        if messages[-1].role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs the last message to be from the assistant.",
                param="continue_final_message",
            )
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt=false.",
                param="continue_final_message",
            )
    _check_turns(messages)


def _check_turns(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        calls = message.tool_calls is not None
        if calls and message.role != "assistant":
            fault = "only the assistant calls tools: leave tool_calls out."
        elif (message.tool_call_id is None) == (message.role == "tool"):
            fault = 'tool_call_id goes with the role "tool", and only with that.'
        elif message.content is None and not calls:
            fault = "content is missing."
        else:
            continue
        raise InvalidRequestError(f"messages[{index}]: {fault}", param=f"messages[{index}]", code="invalid_value")


def _check_candidates(request: ChatRequest | CompletionRequest) -> None:
    """What is known only at the end cannot be streamed, and what has no effect is not asked for."""
    chosen = request.num_candidates > request.num_answers
    faults = [
        ("best_of", request.num_candidates < request.num_answers, "it must be at least n"),
        ("best_of", chosen and request.stream, "answers are chosen at their end: leave out stream or best_of"),
        ("use_beam_search", request.use_beam_search and request.stream, "beams cannot be streamed: leave out stream"),
        ("prompt_logprobs", request.prompt_logprobs is not None and request.stream, "they cannot be streamed"),
        ("length_penalty", request.length_penalty is not None and not request.use_beam_search, "it is for beam search"),
        ("length_penalty", not -10 <= (request.length_penalty or 0.0) <= 10, "it must be between -10 and 10"),
    ]
    for param, wrong, why in faults:
        if wrong:
            raise InvalidRequestError(f"{param}: {why}.", param=param, code="invalid_value")


def _refuse(request: msgspec.Struct, *fields: str) -> None:
    for field in fields:
        _refuse_unless(getattr(request, field) is None, field)


def _refuse_unless(neutral: bool, field: str) -> None:
    if not neutral:
        raise UnsupportedFeatureError(f"{field} is not supported by this server: leave it out.", param=field)


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    stop = request.stop
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        typical_p=request.typical_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}),
        min_tokens=request.min_tokens or 0,
        ignore_eos=request.ignore_eos,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        seed=request.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        repetition_detection=request.repetition_detection,
    )


def _logit_bias(raw: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Token ids are strings on the wire, as JSON wants keys to be: of few digits, or reading them would take long."""
    biases: dict[int, float] = {}
    for key, bias in raw.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_ID_DIGITS):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers; {key[:40]!r} is no token id.",
                param="logit_bias",
                code="invalid_value",
            )
        if int(key) in biases:
            raise InvalidRequestError(
                f"logit_bias names the token {int(key)} twice.", param="logit_bias", code="invalid_value"
            )
        biases[int(key)] = bias
    return tuple(biases.items())
