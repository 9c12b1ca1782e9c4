"""The on-device engine: a small GGUF model in this process that serves many requests at once.

The engine reports the signals that the router's gates use. Per token: log-probability, entropy and margin. Per prompt:
a hidden state and, for small models or on request, the log-probabilities of the prompt's tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from ..model_files.gguf_header import GgufHeader
from ..model_files.gguf_reader import read_model_header
from ..model_files.sampling_defaults import gguf_sampling
from ..protocol.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from ..protocol.prompts import Prompt
from ..protocol.requests import Message
from ..protocol.safety.redaction import printable
from ..protocol.sampling import SamplingParams
from ..protocol.structured import AnswerOptions, Constraint, RenderOptions
from ..text.chat import ChatPrompt, ChatTemplate, encoding_runs, special_pattern
from ..text.control_tokens import unflagged_control_tokens
from ..text.templates import tool_messages as tool_turns
from ..text.templates.reasoning import ReasoningStyle
from ..text.tool_stream import AnswerSyntax, OfferedTools
from .llama.adapter_file import read_adapter
from .llama.context import ContextOptions, LlamaContext, LoraAdapter
from .llama.library import Floats, LlamaModel
from .llama.plain_text import PlainTextTokenizer, missing_bytes, suspicious_settings
from .machine.machine import default_threads
from .model_identity import template_sources
from .options import LocalOptions
from .runtime.context_layout import ContextLayout, ModelTraits, settled
from .runtime.generation import Generation, LocalGenerationRequest, LocalToken, Scoring
from .runtime.loop import LocalEngineLoop, LoopOptions
from .runtime.run import LocalRun, Resources
from .runtime.scheduler import SchedulerLimits
from .sampling.row_sampler import RowSampler
from .sampling.signals import TokenSignals

if TYPE_CHECKING:
    from ..text.grammars.compiler import Vocabulary
    from ..text.grammars.state import Grammars
    from ..text.tool_formats import ToolFormat

__all__ = ["LocalEngine", "LocalOptions", "LocalRun", "LocalToken", "LoraAdapter", "TokenSignals"]

log = logging.getLogger("updraft.local_engine")
_PIECES = 4096  # maximum number of tokens whose bytes are cached
# A prompt with at most this many characters per token of context skips the exact length check, which takes 0.2 s.
_USUAL_TOKEN = 16


class LocalEngine:
    """A loaded model and the thread that runs it (`LocalEngineLoop`). Threads and event loops can share the engine."""

    def __init__(self, model: LlamaModel, header: GgufHeader, model_id: str, options: LocalOptions) -> None:
        """Private: call `LocalEngine.load` instead."""
        self.model_id = model_id
        traits = ModelTraits(model.parameters, model.vocab_size, model.train_context, model.is_recurrent)
        layout = ContextLayout.of(traits, options)
        self.context_length = layout.context_length
        self.hidden_size = model.hidden_size
        self.sampling_defaults = gguf_sampling(header.metadata, model_id)
        self._default_max_tokens = options.default_max_tokens
        self._model = model
        # Cached, because a call into llama.cpp releases the GIL, and waiting to get the GIL back would delay tokens.
        self._piece = lru_cache(_PIECES)(model.token_bytes)
        self._tool_call_parser = options.tool_call_parser
        sources = template_sources(header, self.model_id, options, {*model.control_tokens, *model.user_defined})
        marks = unflagged_control_tokens(model.user_defined, sources.default, sources.tool_use)
        special = [*model.control_tokens, *marks]
        self._special = special_pattern(special)
        self._plain = PlainTextTokenizer(model, marks)
        self.chat_template = ChatTemplate(
            sources, bos_token=model.bos_text, eos_token=model.eos_text, special_tokens=special
        )
        if options.tool_call_parser != "auto":
            _ = self.tool_format  # raises an error now, not at the first request, if the name is unknown
        self._scores_prompts = layout.scores_prompts
        self._resources = Resources(_start_loop(model, layout, options))

    @classmethod
    def load(cls, path: Path | str, options: LocalOptions | None = None) -> LocalEngine:
        """Map a GGUF file into memory and create its context.

        Raises ModelLoadError for a file that is missing, truncated, unsupported or without a usable context, and for
        adapters made for another model; MissingDependencyError if llama-cpp-python is not installed;
        InvalidRequestError or ConfigurationError for invalid options.
        """
        path, options = Path(path), options or LocalOptions()
        options.check()
        header = read_model_header(path)
        for warning in suspicious_settings(header):
            log.warning("%s: %s", printable(path.name), warning)
        for adapter in options.adapters:
            read_adapter(adapter.path, header)
        options = settled(header, options)
        model = LlamaModel(
            path, gpu_layers=options.gpu_layers, repack=options.repack is not False, missing=missing_bytes(path, header)
        )
        try:
            if options.max_model_len is not None and options.max_model_len > model.train_context:
                raise ModelLoadError(
                    f"{path.name} was trained on {model.train_context} tokens of context, "
                    f"but max_model_len is {options.max_model_len}: lower max_model_len."
                )
            name = os.fsencode(path.stem).decode("utf-8", "replace")  # responses and the ledger accept only UTF-8
            return cls(model, header, options.model_id or name, options)
        except BaseException:
            model.close()
            raise

    @property
    def threads(self) -> int:
        """Threads used by the last step; fewer than `LocalOptions.threads` on a busy machine."""
        return self._resources.loop.threads

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's tool calls; None if the chat template shows no known format."""
        from ..text.tool_formats import ToolFormat

        return ToolFormat.of(self._tool_call_parser, self)

    @property
    def reasoning(self) -> ReasoningStyle | None:
        """Style of the model's reasoning before its answer; None if the chat template shows no known style."""
        return ReasoningStyle.of(self.chat_template.source)

    def special_id(self, text: str) -> int | None:
        """Return the id of the control token spelled `text`; None if the model has no such token."""
        return self._model.special_id(text)

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of all tokens, for grammars. Takes half a second for 150,000 tokens."""
        from .llama.vocabulary import vocabulary

        return vocabulary(self._model)

    def start(self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]) -> LocalRun:
        """Start an answer to a chat and return its token iterator. `continue_final_message` continues the last message.

        The model sees the `tools`, but only a `constraint` (see `ToolFormat.constraint`) ensures valid tool calls.
        Without a constraint, an answer limited to one call ends after that call. Check untrusted constraints with
        `text.grammars.check` first, because they are compiled in the caller's thread without a time limit. The answer
        ends when the context is full, even with a larger `max_tokens`. Raises ContextLengthError if the prompt fills
        the context, InvalidRequestError if the template rejects the messages or the constraint is unusable,
        OverloadedError if the queue is full.
        """
        tools, constraint = options.get("tools"), options.get("constraint")
        continues = options.get("continue_final_message", False)
        prompt = self.chat_prompt(
            messages,
            tools=() if tools is None else tools.tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_options={
                **self.chat_template.effort_variables(options.get("effort")),
                **(options.get("template_options") or {}),
            },
        )
        form = None if tools is None else self.tool_format
        offered = None if tools is None or form is None else OfferedTools(form, tools)
        if constraint is not None:  # a grammar forbids reasoning
            prompt = replace(prompt, reasoning=None)
        return self._start(prompt, params, constraint, offered)

    def start_text(self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None) -> LocalRun:
        """Continue a prompt without a chat template. BOS and EOS tokens are added to text, but not to a list of ids.

        Raises the same errors as `start`.
        """
        tokens = self.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        if not all(0 <= token < self._model.vocab_size for token in tokens):
            raise InvalidRequestError(f"Token ids must be between 0 and {self._model.vocab_size - 1}.", param="prompt")
        return self._start(ChatPrompt(list(tokens), None), params, constraint, None)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of raw text, with the BOS and EOS tokens that the model requires."""
        self._refuse_hopeless(len(text))
        return [*self._model.front, *self._plain.tokenize(text), *self._model.back]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens, with U+FFFD for incomplete characters."""
        return b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids).decode(errors="replace")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`, without BOS and EOS. `allow_special`: recognize control tokens in `text`."""
        return self._model.tokenize(text, allow_special=True) if allow_special else self._plain.tokenize(text)

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[int]:
        """Return the token ids of a chat, without the reasoning style. Raises the errors of `chat_prompt`."""
        return self.chat_prompt(messages, **options).ids

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> ChatPrompt:
        """Encode a chat. Control tokens come from the template only; a required BOS token is added if it is missing.

        Raises ModelLoadError if the template is broken, InvalidRequestError if the template rejects the messages.
        """
        texts = [*(message.text for message in messages), *tool_turns.texts(messages, options.get("tools", ()))]
        self._refuse_hopeless(sum(map(len, texts)))
        segments, reasoning = self.chat_template.rendered(messages, **options)
        runs = encoding_runs(segments, self._special)
        tokens = [token for run in runs for token in self.encode(run.text, allow_special=run.is_control)]
        front = self._model.front
        return ChatPrompt(tokens if tokens[:1] == front else front + tokens, reasoning)

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token, for the `bytes` of log-probabilities; empty for control tokens by default."""
        return self._model.token_bytes(token_id, skip_special=skip_special)

    def score(self, token_ids: Sequence[int]) -> Floats:
        """Return log-probabilities (n, vocab), float32; row i is for the token after `token_ids[: i + 1]`.

        Raises ContextLengthError if the tokens do not fit, InvalidRequestError for an empty list or unknown ids.
        """
        tokens = list(token_ids)
        if not tokens or not all(0 <= token < self._model.vocab_size for token in tokens):
            raise InvalidRequestError(f"token_ids must be one or more ids below {self._model.vocab_size}.")
        if len(tokens) > self.context_length:
            raise ContextLengthError(f"{len(tokens)} tokens do not fit the context of {self.context_length}.")
        scoring = Scoring.of(tokens, self._model.vocab_size)
        self._resources.loop.submit(scoring)
        return scoring.result.result()

    def close(self) -> None:
        """Free the model after the current step. Active runs then raise EngineError."""
        self.chat_template.close()
        self._resources.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_hopeless(self, characters: int) -> None:
        """Reject a prompt that has too many characters to fit, because tokenizing a megabyte takes seconds."""
        if characters <= self.context_length * _USUAL_TOKEN:
            return  # skip `longest_token`, which reads the whole vocabulary
        if characters > self.context_length * self._model.longest_token:
            raise ContextLengthError(
                f"The prompt of {characters:,} characters cannot fit the context of {self.context_length} tokens: "
                "shorten the messages.",
                param="messages",
            )

    @cached_property
    def _grammars(self) -> Grammars:
        from .llama.vocabulary import grammars

        return grammars(self._model)

    def _start(
        self, chat: ChatPrompt, params: SamplingParams, constraint: Constraint | None, tools: OfferedTools | None
    ) -> LocalRun:
        prompt, syntax = chat.ids, AnswerSyntax(tools, chat.reasoning)
        if not prompt:
            raise InvalidRequestError("The prompt is empty: send at least one token.", param="prompt")
        params.check_vocabulary(self._model.vocab_size)
        remaining = self.context_length - len(prompt)
        if remaining < 1:
            raise ContextLengthError(
                f"The prompt of {len(prompt)} tokens does not fit the context of {self.context_length} tokens: shorten "
                "the messages.",
                param="messages",
            )
        params = params.resolved(self.sampling_defaults)
        ends = params.end_ids(self._model.end_ids)
        grammar = constraint and self._grammars.begin(constraint, ignore_eos=params.ignore_eos)
        request = LocalGenerationRequest(
            prompt,
            params,
            limit=min(remaining, params.max_tokens or self._default_max_tokens),
            end_ids=ends,
            sampler=RowSampler(params, prompt, ends, grammar),
            detects_repetition=params.detects_repetition and grammar is None and tools is None,
            score_prompt=self._scores_prompts or params.prompt_logprobs is not None,
            marks=syntax.marks(self),
            reasoning=chat.reasoning,
            end=syntax.end(params, constraint),
        )
        generation = Generation(request, self._piece)
        self._resources.loop.submit(generation)
        return LocalRun(self._resources, generation)


def _start_loop(model: LlamaModel, layout: ContextLayout, options: LocalOptions) -> LocalEngineLoop:
    """Create the context that the options describe, and start the engine's thread."""
    context = LlamaContext(
        model,
        ContextOptions(
            n_ctx=layout.cells,
            n_batch=layout.rows,
            n_outputs=layout.outputs,
            n_sequences=layout.sequences,
            n_threads=options.threads or default_threads(model.parameters),
            kv_cache_type=layout.kv_cache_type,
            flash_attention=False if layout.exact else options.flash_attention,
            separate=layout.sharing == "nothing",
            adapters=options.adapters,
        ),
    )
    mixes = layout.sharing == "parts"
    limits = SchedulerLimits(
        layout.parallel, rows=layout.rows, outputs=layout.outputs, mixes=mixes, sharing=layout.sharing
    )
    return LocalEngineLoop(model, context, LoopOptions(layout.cells, layout.sequences, options.max_waiting, limits))
