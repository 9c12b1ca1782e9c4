"""Conversion of request bodies to engine requests and the format of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from ....protocol.decoding import read_object
from ....protocol.embeddings import EmbeddingRequest
from ....protocol.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, UnsupportedFeatureError
from ....protocol.http.wire import new_id
from ....protocol.prompts import Prompt
from ....protocol.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from ....protocol.responses import AnswerNotes
from ....protocol.sampling import SamplingDefaults
from ....protocol.structured import ignored
from ....text.templates import tool_messages as tool_turns
from ....text.tokenizer import Tokenizer
from ....text.tool_formats import ToolFormat
from ....text.tool_stream import AnswerSyntax, OfferedTools
from ...engine.types.request import MAX_PRIORITY, GenerationRequest
from ..answers.answer_stream import TokenExchange
from ..answers.best_of import BestOf
from ..answers.formats import AnswerFormat, ChatFormat, TextFormat
from ..answers.prompt_report import PromptReport, ReportedPrompt
from ..answers.running_usage import RunningUsage, TokenCounter


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request, as the gateway names it. Only a caller with the node's key can set it."""

    # Opaque id; empty without a gateway.
    id: str = ""
    # Share of the node with `--scheduling-policy fair`, relative to other tenants.
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request, ready for the engine."""

    # One engine request per prompt.
    generations: list[GenerationRequest]
    format: AnswerFormat
    stream: bool
    include_usage: bool
    # Name of the prompt's field in the client's request.
    prompt_field: str
    # Tools that the answers may call, and the markers of reasoning before an answer.
    syntax: AnswerSyntax | None = None
    # Token ids that the client sends and requests.
    tokens: TokenExchange | None = None


class RequestPreprocessor:
    """Validates and prepares requests for one model. `tool_format` is None if the model cannot call tools."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_id: str,
        context_length: int,
        tool_format: ToolFormat | None,
        sampling: SamplingDefaults,
    ) -> None:
        self._tokenizer = tokenizer
        self._model_id = model_id
        self._tool_format = tool_format
        self._sampling = sampling
        self._max_prompt_bytes = tokenizer.limit(context_length)

    def chat(
        self, body: bytes, tenant: Tenant, hints: tuple[str, ...] = (), names: Mapping[str, str] | None = None
    ) -> PreparedRequest:
        """Prepare a chat request. `hints`: notes for the answer. `names`: field names in the client's own API."""
        fields = read_object(body)
        request, hints = read_chat(fields), (*hints, *ignored(fields, names=names))
        offered = self._offered(request)
        tools = [] if offered is None else offered.use.tools
        texts = tool_turns.texts(request.messages, tools)
        self._check(request)
        self.check_size("messages", *(message.text for message in request.messages), *texts)
        effort, field = request.effort
        template = self._tokenizer.chat_template
        variables = {} if template is None else template.effort_variables(effort)
        if effort not in (None, "none") and not variables:
            hints += (
                f"{(names or {}).get('reasoning_effort', field)}: no effect, the model has no setting for reasoning",
            )
        chat = self._tokenizer.chat_prompt(
            request.messages,
            tools=tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_options={**variables, **(request.chat_template_kwargs or {})},
        )
        prompt = chat.ids + self._given_answer(request)
        prediction = request.prediction.text if request.prediction else ""
        self.check_size("prediction", prediction)
        each = _generation(request, prompt, tenant, self._tokenizer.encode(prediction))
        if offered is not None:
            constraint = offered.format.constraint(offered.use, each.constraint)
            params = replace(each.params, repetition_detection=False)  # arguments of tools may be repetitive
            # The text of a tool call may end the answer, so the engine must report tokens as soon as possible.
            each = replace(each, params=params, constraint=constraint, streamed=True)
        reasoning = None if each.constraint is not None else chat.reasoning  # a grammar forbids reasoning
        syntax = AnswerSyntax(offered, reasoning)
        shape = ChatFormat(*self._shape(request), _noted(hints, request, each), syntax)
        return replace(self._job(request, [each], shape), syntax=syntax)

    def completion(self, body: bytes, tenant: Tenant) -> PreparedRequest:
        fields = read_object(body)
        request, hints = read_completion(fields), ignored(fields, reasons=False)
        self._check(request)
        prompts = self._token_ids(request.prompts, "prompt")
        given = self._given_answer(request)
        generations = [_generation(request, prompt + given, tenant, []) for prompt in prompts]
        return self._job(
            request, generations, TextFormat(*self._shape(request), _noted(hints, request, generations[0]))
        )

    def inputs(self, request: EmbeddingRequest) -> list[list[int]]:
        """Return the token ids of all inputs of an embedding request."""
        self.check_model(request.model)
        return self._token_ids(request.inputs, "input")

    def check_model(self, model: str | None) -> None:
        """Check that the request asks for the served model; None also means this model. Raises ModelNotFoundError."""
        if model not in (None, self._model_id):
            raise ModelNotFoundError(
                f"Model {model!r} not found; this server serves {self._model_id!r}.", param="model"
            )

    def _offered(self, request: ChatRequest) -> OfferedTools | None:
        """Return the tools that a request offers, or None."""
        if request.tool_use is None:
            return None
        if self._tool_format is None:
            raise UnsupportedFeatureError(
                "tools: this model's chat template has no known format for tool calls. Omit tools, or start the node "
                "with --tool-call-parser.",
                param="tools",
            )
        return OfferedTools(self._tool_format, request.tool_use)

    def _given_answer(self, request: ChatRequest | CompletionRequest) -> list[int]:
        given, vocab_size = request.answer_token_ids or [], self._tokenizer.vocab_size
        if not all(0 <= token < vocab_size for token in given):
            raise InvalidRequestError(f"Token ids must be between 0 and {vocab_size - 1}.", param="answer_token_ids")
        return given

    def _token_ids(self, prompts: list[Prompt], param: str) -> list[list[int]]:
        for prompt in prompts:
            self.check_size(param, prompt if isinstance(prompt, str) else "")
        return [self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _shape(
        self, request: ChatRequest | CompletionRequest
    ) -> tuple[Tokenizer, str, bool, int, bool, SamplingDefaults]:
        """Return the constructor arguments that all answer formats share."""
        params = request.sampling().resolved(self._sampling)
        logprobs = params.logprobs is not None
        return self._tokenizer, self._model_id, logprobs, request.num_answers, _includes_usage(request), params.stated

    def _job(
        self, request: ChatRequest | CompletionRequest, generations: list[GenerationRequest], shape: AnswerFormat
    ) -> PreparedRequest:
        n, num_generated = request.num_answers, generations[0].n
        echoes = self._echoed_prompts(request)
        if request.sampling().prompt_logprobs is not None or echoes:
            texts = echoes or [None] * len(generations)
            prompts = [ReportedPrompt(each.prompt_ids, text) for each, text in zip(generations, texts, strict=True)]
            shape = PromptReport(shape, self._tokenizer, prompts, n, request.prompt_logprobs)
        if num_generated > n:
            shape = BestOf(shape, n, num_generated)
        if request.running_usage:
            shape = RunningUsage(shape, TokenCounter(generations))
        prompt_field = "messages" if isinstance(request, ChatRequest) else "prompt"
        reports_tokens = bool(request.stream and request.return_token_ids)
        return PreparedRequest(
            generations,
            shape,
            request.stream,
            _includes_usage(request),
            prompt_field,
            tokens=TokenExchange(reports_tokens, request.answer_token_ids or ()),
        )

    def _echoed_prompts(self, request: ChatRequest | CompletionRequest) -> list[str]:
        """Return the prompts as text if the request asks to echo them, else an empty list."""
        if not isinstance(request, CompletionRequest) or not request.echo:
            return []
        return [prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt) for prompt in request.prompts]

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        self.check_model(request.model)
        if request.updraft is not None:
            raise UnsupportedFeatureError(
                "updraft options are for the router, but this is a node: omit them.", param="updraft"
            )

    def check_size(self, param: str, *texts: str) -> None:
        """Check that texts are not too long for the context, before spending seconds on tokenizing them.

        Messages are measured without surrounding blanks, which chat templates may strip. Raises ContextLengthError.
        """
        measured = map(str.strip, texts) if param == "messages" else texts
        size = sum(len(text.encode("utf-8", "replace")) for text in measured)
        if size > self._max_prompt_bytes:
            raise ContextLengthError(
                f"{param} has {size} bytes, but this model's context holds at most {self._max_prompt_bytes}.",
                param=param,
            )


def _generation(
    request: ChatRequest | CompletionRequest, prompt: list[int], tenant: Tenant, draft: list[int]
) -> GenerationRequest:
    params = request.sampling()
    if request.num_candidates > request.num_answers:
        params = replace(params, logprobs=params.logprobs or 0)  # needed to rank the answers of `best_of`
    return GenerationRequest(
        new_id("gen"),
        prompt,
        params,
        draft,
        n=request.num_candidates,
        priority=max(-MAX_PRIORITY, min(request.priority or 0, MAX_PRIORITY)),
        tenant=tenant.id,
        weight=tenant.weight,
        cache_salt=json.dumps([tenant.id, request.cache_salt or ""]),
        constraint=request.constraint(),
        streamed=request.stream or bool(params.stop),  # this process matches stop strings, so it needs tokens early
    )


def _noted(
    hints: tuple[str, ...], request: ChatRequest | CompletionRequest, generation: GenerationRequest
) -> AnswerNotes | UnsetType:
    """Return the answer's notes: hints without effect, a changed priority, and parts of the schema not enforced."""
    clamped = [] if generation.priority == (request.priority or 0) else [f"priority: {generation.priority} is used"]
    notes = [*hints, *clamped, *(() if generation.constraint is None else generation.constraint.notes)]
    return AnswerNotes(notes=notes) if notes else UNSET


def _includes_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage
