"""The on-device engine: a small GGUF model in this process, many answers at once, and all that routing wants to know.

Per token: log-probability, entropy and margin. Per prompt: its hidden state and, where they are cheap or asked for, the
log-probabilities of its tokens. The gates of the router live on these.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
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
from ..protocol.safety.terminal_text import printable
from ..protocol.sampling import SamplingParams
from ..protocol.structured import AnswerOptions, Constraint, RenderOptions
from ..text.chat import ChatTemplate, encoding_runs, special_pattern
from ..text.marks import typed_marks
from ..text.templates import tool_messages as tool_turns
from ..text.templates.reasoning import ReasoningStyle
from ..text.tool_stream import OfferedTools
from .llama.adapter_file import read_adapter
from .llama.context import ContextOptions, LlamaContext, LoraAdapter
from .llama.library import Floats, LlamaModel
from .llama.plain_text import PlainText, missing_bytes, suspicious_settings
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
_PIECES = 4096  # tokens whose bytes are remembered
_USUAL_TOKEN = 16  # characters; texts that could be of longer ones only are worth the fifth of a second of looking


class LocalEngine:
    """A loaded model, and the thread that runs it (`LocalEngineLoop`). Thread-safe, and at home in event loops."""

    def __init__(self, model: LlamaModel, header: GgufHeader, model_id: str, options: LocalOptions) -> None:
        """Use `LocalEngine.load`."""
        self.model_id = model_id
        traits = ModelTraits(model.parameters, model.vocab_size, model.train_context, model.is_recurrent)
        layout = ContextLayout.of(traits, options)
        self.context_length = layout.context_length
        self.hidden_size = model.hidden_size
        self.sampling_defaults = gguf_sampling(header.metadata, model_id)
        self._default_max_tokens = options.default_max_tokens
        self._model = model
        # llama.cpp is asked once: while it is, other threads run, and a step would wait for them at each token.
        self._piece = lru_cache(_PIECES)(model.token_bytes)
        self._tool_parser = options.tool_parser
        sources = template_sources(header, self.model_id, options, {*model.control_tokens, *model.user_defined})
        marks = typed_marks(model.user_defined, sources.default, sources.tool_use)
        special = [*model.control_tokens, *marks]
        self._special = special_pattern(special)
        self._plain = PlainText(model, marks)
        bos, eos = model.text_of("bos"), model.text_of("eos")
        self.chat_template = ChatTemplate(sources, bos_token=bos, eos_token=eos, special_tokens=special)
        if options.tool_parser != "auto":
            _ = self.tool_format  # a name that is none is refused here
        self._scores_prompts = layout.scores_prompts
        self._resources = Resources(_start_loop(model, layout, options))

    @classmethod
    def load(cls, path: Path | str, options: LocalOptions | None = None) -> LocalEngine:
        """Map a GGUF file and make its context ready.

        Raises ModelLoadError for a file that is missing, truncated, foreign or without a usable context, and for
        adapters that are for another model;
        MissingDependencyError if llama-cpp-python is not installed; InvalidRequestError or ConfigurationError for
        impossible options.
        """
        path, options = Path(path), options or LocalOptions()
        options.check()
        header = read_model_header(path)
        for doubt in suspicious_settings(header):
            log.warning("%s: %s", printable(path.name), doubt)
        for adapter in options.adapters:
            read_adapter(adapter.path, header)
        options = settled(header, options)
        model = LlamaModel(
            path,
            gpu_layers=options.gpu_layers,
            repack=options.repack is not False,
            missing=missing_bytes(path, header),
        )
        try:
            if options.context_length is not None and options.context_length > model.train_context:
                raise ModelLoadError(
                    f"{path.name} was trained on {model.train_context} tokens of context, "
                    f"{options.context_length} were asked for: lower context_length."
                )
            name = os.fsencode(path.stem).decode("utf-8", "replace")  # responses and ledger take UTF-8 only
            return cls(model, header, options.model_id or name, options)
        except BaseException:
            model.close()
            raise

    @property
    def threads(self) -> int:
        """The threads of the last step: fewer than `LocalOptions.threads` while others need the processors."""
        return self._resources.loop.threads

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None if its chat template shows none that is known here."""
        from ..text.tool_formats import ToolFormat

        return ToolFormat.of(self._tool_parser, self)

    @property
    def reasoning(self) -> ReasoningStyle | None:
        """The model's way to think before it answers; None if its chat template shows none."""
        return ReasoningStyle.of(self.chat_template.source)

    def special_id(self, text: str) -> int | None:
        """The control token written `text`; None if there is none."""
        return self._model.special_id(text)

    def vocabulary(self) -> Vocabulary:
        """The bytes of all tokens, for grammars. Takes half a second for 150,000."""
        from .llama.vocabulary import vocabulary

        return vocabulary(self._model)

    def start(self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]) -> LocalRun:
        """Begin an answer to a chat: iterate it. With `continue_final_message` the last message goes on.

        `tools` are shown to the model; what holds an answer to them is `tool_format.constraint`. Without one, an answer
        that may make one call ends behind it. The constraint is compiled here, in the caller's thread, which takes as
        long as it wants: see `text.grammar_check` for those of strangers. An answer that reaches the end of the context
        ends there, whatever `max_tokens` says. Raises ContextLengthError if the prompt leaves no room for a token,
        InvalidRequestError if the template refuses the messages or the constraint cannot be used, OverloadedError if
        too many requests wait already.
        """
        tools, constraint = options.get("tools"), options.get("constraint")
        continues = options.get("continue_final_message", False)
        prompt = self.encode_chat(
            messages,
            tools=() if tools is None else tools.tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_options=options.get("template_options"),
        )
        form = None if tools is None else self.tool_format
        reasoning = None if constraint is not None else self.reasoning
        offered = None if tools is None or form is None else OfferedTools(form, tools, reasoning)
        return self._start(prompt, params, constraint, offered)

    def start_text(self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None) -> LocalRun:
        """A continuation of raw text, with a BOS token in front if the model wants one, or of tokens as they are.

        Raises as `start` does.
        """
        tokens = self.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        if not all(0 <= token < self._model.vocab_size for token in tokens):
            raise InvalidRequestError(f"Token ids must be between 0 and {self._model.vocab_size - 1}.", param="prompt")
        return self._start(tokens, params, constraint, None)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of raw text, with a BOS token in front if the model wants one."""
        self._refuse_hopeless(len(text))
        return [*self._model.front, *self._plain.tokenize(text), *self._model.back]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens; U+FFFD for half a character."""
        return b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids).decode(errors="replace")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text` alone; control tokens in it are read as such only if allowed."""
        return self._model.tokenize(text, allow_special=True) if allow_special else self._plain.tokenize(text)

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[int]:
        """Token ids of the rendered chat; control tokens come from the template only, but for a BOS token that the file
        wants and the template does not write.

        Raises ModelLoadError if the template is broken, InvalidRequestError if it refuses the messages.
        """
        texts = [*(message.text for message in messages), *tool_turns.texts(messages, options.get("tools", ()))]
        self._refuse_hopeless(sum(map(len, texts)))
        runs = encoding_runs(self.chat_template.segments(messages, **options), self._special)
        tokens = [token for run in runs for token in self.encode(run.text, allow_special=run.is_control)]
        return tokens if tokens[:1] == self._model.front else self._model.front + tokens

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of one token; empty for control tokens unless asked for. For the `bytes` of log-probabilities."""
        return self._model.token_bytes(token_id, skip_special=skip_special)

    def score(self, token_ids: Sequence[int]) -> Floats:
        """Log-probabilities (n, vocab), float32: row i is the distribution of the token after `token_ids[: i + 1]`.

        Raises ContextLengthError if the tokens do not fit, InvalidRequestError for none or for unknown ids.
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
        """Free the model, once no step is running. Runs in progress raise EngineError."""
        self.chat_template.close()
        self._resources.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_hopeless(self, characters: int) -> None:
        """Tokenizing a megabyte takes seconds: refuse first what cannot fit however well it packs."""
        if characters <= self.context_length * _USUAL_TOKEN:
            return  # without a look at the vocabulary
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
        self, prompt: list[int], params: SamplingParams, constraint: Constraint | None, tools: OfferedTools | None
    ) -> LocalRun:
        if not prompt:
            raise InvalidRequestError("The prompt is empty: there is nothing to continue.", param="prompt")
        params.check_vocabulary(self._model.vocab_size)
        room = self.context_length - len(prompt)
        if room < 1:
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
            limit=min(room, params.max_tokens or self._default_max_tokens),
            end_ids=ends,
            sampler=RowSampler(params, prompt, ends, grammar),
            detects_repetition=params.detects_repetition and grammar is None and tools is None,
            score_prompt=self._scores_prompts or params.prompt_logprobs is not None,
            marks={} if tools is None else tools.format.marks,
            call_limit=tools and tools.call_limit(constraint, detects_repetition=params.detects_repetition),
        )
        generation = Generation(request, self._piece)
        self._resources.loop.submit(generation)
        return LocalRun(self._resources, generation)


def _start_loop(model: LlamaModel, layout: ContextLayout, options: LocalOptions) -> LocalEngineLoop:
    """The context that the options ask for, and its thread."""
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
    return LocalEngineLoop(model, context, LoopOptions(layout.cells, layout.sequences, options.queue_limit, limits))
