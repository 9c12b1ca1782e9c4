"""The on-device engine: a small GGUF model in this process, one answer at a time, and all that routing wants to know.

Per token: log-probability, entropy and margin. Per prompt: its hidden state and the log-probability of each of its
tokens. The gates of the router live on these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from ..protocol.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from ..protocol.requests import Message
from ..protocol.sampling import SamplingParams
from ..text.chat import ChatTemplate, encoding_runs, special_pattern
from .cache import CachedContext
from .gguf import GgufHeader, read_header
from .llama import ContextOptions, Floats, LlamaModel
from .run import LocalRun, LocalToken, Resources
from .sampler import TokenSignals
from .turns import Turns

__all__ = ["LocalEngine", "LocalOptions", "LocalRun", "LocalToken", "TokenSignals"]

_DEFAULT_MAX_CONTEXT = 4096
_OUTPUT_VALUES = 2**23  # logits of one decode call: 32 MiB
# Characters of the longest token any vocabulary was seen to have, with room to spare.
_LONGEST_TOKEN = 512
_THREAD_PARAMETERS = 20_000_000
_SMALL = 100_000_000


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """`context_length`: tokens of prompt and answer together; None: what the model was trained on, at most 4,096.
    `threads`: None for one per 20 million parameters, up to the physical cores: on less work the threads mostly wait
    for each other. `gpu_layers`: None for llama.cpp's choice, 0 for none. `exact_attention`: float32 KV cache, no
    flash attention; None: for models under 100 million parameters, where it costs nothing. `model_id`: None for the
    name of the file."""

    context_length: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    exact_attention: bool | None = None
    model_id: str | None = None


class LocalEngine:
    """A loaded model. Thread-safe; concurrent runs take turns (see `Turns`)."""

    def __init__(self, model: LlamaModel, header: GgufHeader, model_id: str, options: LocalOptions) -> None:
        """Use `LocalEngine.load`."""
        self.model_id = model_id
        self.context_length = options.context_length or min(model.train_context, _DEFAULT_MAX_CONTEXT)
        self.hidden_size = model.hidden_size
        temperature = header.metadata.get("general.sampling.temp")
        self.default_temperature: float | None = None if temperature is None else float(temperature)
        self._model = model
        self._special = special_pattern(model.control_tokens)
        self._template = _template(model, header)
        exact = options.exact_attention
        context = model.new_context(
            ContextOptions(
                n_ctx=self.context_length,
                n_batch=min(256, max(32, _OUTPUT_VALUES // model.vocab_size // 32 * 32)),
                n_threads=options.threads or min(_physical_cores(), max(1, model.parameters // _THREAD_PARAMETERS)),
                exact_attention=model.parameters < _SMALL if exact is None else exact,
            )
        )
        self._resources = Resources(model, CachedContext(context), Turns())

    @classmethod
    def load(cls, path: Path | str, options: LocalOptions | None = None) -> LocalEngine:
        """Map a GGUF file and make its context ready.

        Raises ModelLoadError for a file that is missing, truncated, foreign or without a usable context;
        MissingDependencyError if llama-cpp-python is not installed; InvalidRequestError for impossible options.
        """
        path, options = Path(path), options or LocalOptions()
        for name in ("context_length", "threads"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}.", param=name, code="invalid_value")
        header = read_header(path)
        model = LlamaModel(path, gpu_layers=options.gpu_layers)
        try:
            if options.context_length is not None and options.context_length > model.train_context:
                raise ModelLoadError(
                    f"{path.name} was trained on {model.train_context} tokens of context, "
                    f"{options.context_length} were asked for: lower context_length."
                )
            return cls(model, header, options.model_id or path.stem, options)
        except BaseException:
            model.close()
            raise

    def start(
        self, messages: Sequence[Message], params: SamplingParams, *, continue_final_message: bool = False
    ) -> LocalRun:
        """An answer to a chat, not begun yet: iterate it. With `continue_final_message` the last message goes on.

        Raises ContextLengthError if prompt plus `max_tokens` (or one token) does not fit, InvalidRequestError if the
        template refuses the messages.
        """
        prompt = self.encode_chat(
            messages, add_generation_prompt=not continue_final_message, continue_final_message=continue_final_message
        )
        return self._start(prompt, params)

    def start_text(self, prompt: str, params: SamplingParams) -> LocalRun:
        """A continuation of raw text, with a BOS token in front if the model wants one. Raises as `start` does."""
        self._refuse_hopeless(len(prompt))
        return self._start(self._model.tokenize(prompt, allow_special=False, add_special=True), params)

    def tokenize(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text` alone; control tokens in it are read as such only if allowed."""
        return self._model.tokenize(text, allow_special=allow_special)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> list[int]:
        """Token ids of the rendered chat; control tokens come from the template only.

        Raises ModelLoadError if the file has no chat template, InvalidRequestError if that refuses the messages.
        """
        if self._template is None:
            raise ModelLoadError(f"{self.model_id} has no chat template: use text completion instead.")
        self._refuse_hopeless(sum(len(message.text) for message in messages))
        segments = self._template.segments(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        runs = encoding_runs(segments, self._special)
        return [token for run in runs for token in self.tokenize(run.text, allow_special=run.is_control)]

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
        holder, never = object(), threading.Event()
        with self._resources.turns.step(holder, never):
            rows = self._resources.context.score(tokens)
        self._resources.turns.leave(holder)
        return rows

    def close(self) -> None:
        """Free the model, once no step is running. Runs in progress raise EngineError at their next step."""
        self._resources.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_hopeless(self, characters: int) -> None:
        """Tokenizing a megabyte takes seconds: refuse first what cannot fit however well it packs."""
        if characters > self.context_length * _LONGEST_TOKEN:
            raise ContextLengthError(
                f"The prompt of {characters:,} characters cannot fit the context of {self.context_length} tokens: "
                "shorten the messages.",
                param="messages",
            )

    def _start(self, prompt: list[int], params: SamplingParams) -> LocalRun:
        if not prompt:
            raise InvalidRequestError("The prompt is empty: there is nothing to continue.", param="prompt")
        params.check_vocabulary(self._model.vocab_size)
        room = self.context_length - len(prompt)
        if room < (params.max_tokens or 1):
            wanted = f" and max_tokens={params.max_tokens}" if params.max_tokens else ""
            raise ContextLengthError(
                f"The prompt of {len(prompt)} tokens{wanted} does not fit the context of {self.context_length} tokens: "
                "shorten the messages or lower max_tokens.",
                param="messages",
            )
        default = 1.0 if self.default_temperature is None else self.default_temperature
        return LocalRun(self._resources, prompt, params, limit=params.max_tokens or room, default_temperature=default)


def _template(model: LlamaModel, header: GgufHeader) -> ChatTemplate | None:
    source = header.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    return ChatTemplate(
        source, bos_token=model.text_of("bos"), eos_token=model.text_of("eos"), special_tokens=model.control_tokens
    )


def _physical_cores() -> int:
    """Physical cores this process may use: hyper-threads only slow llama.cpp down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
