"""The part of llama.cpp this project uses, as typed classes over llama_cpp's low-level functions.

Nothing here decides anything: `LlamaModel` loads and tokenizes, `LlamaContext` evaluates.
Both logits and hidden states come from the same decode: `llama_set_embeddings` with pooling type NONE leaves the logits
in place and adds the state after the final norm of every output row.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..protocol.errors import EngineError, MissingDependencyError, ModelLoadError

Floats = npt.NDArray[np.float32]
_LOG_ERROR, _LOG_CONTINUED = 4, 5


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """`n_ctx`: tokens of KV cache; `n_batch`: tokens per decode call at most; `n_threads`: for prompts and answers.

    `exact_attention`: a float32 KV cache and no flash attention, which on a CPU rounds to half precision whatever the
    cache holds: log-probabilities of a float32 model then agree with torch within 1e-4 instead of about 1e-2.
    """

    n_ctx: int
    n_batch: int
    n_threads: int
    exact_attention: bool


class Llama:
    """The loaded shared library: its functions as `api`, and the last error lines it logged."""

    def __init__(self) -> None:
        try:
            from llama_cpp import llama_cpp as api
        except (ImportError, OSError, RuntimeError) as error:  # the last two: a shared library that does not load
            raise MissingDependencyError(
                f"The on-device engine needs llama-cpp-python, which does not import here ({error}). Install it with: "
                "python -m updraft.local_engine.llama_build --install"
            ) from error
        self.api: Any = api
        self.errors: deque[str] = deque(maxlen=8)
        self._last_level = 0
        self._callback = api.llama_log_callback(self._log)  # kept: the library holds only a pointer
        api.llama_log_set(self._callback, ctypes.c_void_p(0))
        api.llama_backend_init()

    def _log(self, level: int, text: bytes, _: object) -> None:
        level = self._last_level if level == _LOG_CONTINUED else level
        self._last_level = level
        if level == _LOG_ERROR and text.strip():
            self.errors.append(text.decode("utf-8", "replace").strip())

    def last_errors(self) -> str:
        """What llama.cpp complained about since the last call, for the text of an exception."""
        lines = "; ".join(self.errors)
        self.errors.clear()
        return lines or "llama.cpp gave no reason"


@functools.cache
def llama() -> Llama:
    """The library, loaded on first use. Raises MissingDependencyError."""
    return Llama()


class LlamaModel:
    """The mapped weights and the vocabulary of one file. Thread-safe."""

    def __init__(self, path: Path, *, gpu_layers: int | None = None) -> None:
        """Raises ModelLoadError, with llama.cpp's own words, if it refuses the file. `gpu_layers` None: its default."""
        library = llama()
        self._api = api = library.api
        self._lock = threading.Lock()  # between `close` and whoever reads the vocabulary
        library.last_errors()
        params = api.llama_model_default_params()
        params.load_mode = api.LLAMA_LOAD_MODE_MMAP
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        self._model: Any = api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelLoadError(f"llama.cpp cannot load {path}: {library.last_errors()}.")
        if api.llama_model_has_encoder(self._model) or not api.llama_model_has_decoder(self._model):
            self.close()
            raise ModelLoadError(f"{path} is no decoder-only language model: it cannot continue text.")
        self._vocab = api.llama_model_get_vocab(self._model)
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        self.hidden_size: int = api.llama_model_n_embd(self._model)
        self.parameters: int = api.llama_model_n_params(self._model)
        self.train_context: int = api.llama_model_n_ctx_train(self._model)
        tokens = range(self.vocab_size)
        self.end_ids = frozenset(token for token in tokens if api.llama_vocab_is_eog(self._vocab, token))
        self._control = frozenset(token for token in tokens if api.llama_vocab_is_control(self._vocab, token))
        self.control_tokens = tuple(api.llama_vocab_get_text(self._vocab, token).decode() for token in self._control)

    def text_of(self, which: Literal["bos", "eos"]) -> str:
        """The BOS or EOS token as text; empty if the vocabulary has none."""
        with self._open() as api:
            token = api.llama_vocab_bos(self._vocab) if which == "bos" else api.llama_vocab_eos(self._vocab)
            return api.llama_vocab_get_text(self._vocab, token).decode() if token >= 0 else ""

    def tokenize(self, text: str, *, allow_special: bool, add_special: bool = False) -> list[int]:
        """Token ids. `allow_special`: read control tokens in `text`; `add_special`: BOS, if the model wants one."""
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 2
        with self._open() as api:
            buffer = (api.llama_token * room)()
            count = api.llama_tokenize(self._vocab, raw, len(raw), buffer, room, add_special, allow_special)
        if count < 0:
            raise EngineError(f"llama.cpp could not tokenize {len(raw)} bytes (code {count}).")
        return buffer[:count]

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes a token stands for; empty for a control token unless asked for."""
        if skip_special and token in self._control:
            return b""
        size = 64
        with self._open() as api:
            while True:
                buffer = ctypes.create_string_buffer(size)
                length = api.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
                if length >= 0:
                    return buffer.raw[:length]
                size = -length

    def new_context(self, options: ContextOptions) -> LlamaContext:
        """Raises ModelLoadError if the KV cache does not fit into memory."""
        with self._open():
            return LlamaContext(self, self._model, options)

    def close(self) -> None:
        """Unmap the weights; every context must be closed before."""
        with self._lock:
            if self._model:
                self._api.llama_model_free(self._model)
            self._model = None

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with self._lock:
            if not self._model:
                raise EngineError("The local engine is closed.")
            yield self._api


class LlamaContext:
    """The KV cache of one sequence and the buffers around it. One thread at a time."""

    def __init__(self, model: LlamaModel, handle: Any, options: ContextOptions) -> None:
        library = llama()
        self._api = api = library.api
        self._shape = (model.vocab_size, model.hidden_size)
        self.n_batch = n_batch = options.n_batch
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = options.n_ctx, n_batch, n_batch, 1
        params.n_threads = params.n_threads_batch = options.n_threads
        if options.exact_attention:
            params.type_k = params.type_v = api.GGML_TYPE_F32
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.embeddings, params.pooling_type = True, api.LLAMA_POOLING_TYPE_NONE
        library.last_errors()
        self._context: Any = api.llama_init_from_model(handle, params)
        if not self._context:
            raise ModelLoadError(
                f"llama.cpp cannot make a context of {options.n_ctx} tokens: {library.last_errors()}. "
                "Ask for a smaller context_length."
            )
        self._memory = api.llama_get_memory(self._context)
        self._batch = batch = api.llama_batch_init(n_batch, 0, 1)
        self._tokens = np.ctypeslib.as_array(batch.token, (n_batch,))
        self._positions = np.ctypeslib.as_array(batch.pos, (n_batch,))
        np.ctypeslib.as_array(batch.n_seq_id, (n_batch,))[:] = 1
        np.ctypeslib.as_array(batch.logits, (n_batch,))[:] = 1  # every row is output: embeddings mode demands it
        for index in range(n_batch):
            batch.seq_id[index][0] = 0

    def keep(self, length: int) -> bool:
        """Forget all but the first `length` tokens; false (and nothing kept) if the model's memory cannot do that."""
        if length and self._api.llama_memory_seq_rm(self._memory, 0, length, -1):
            return True
        self._api.llama_memory_clear(self._memory, False)
        return length == 0

    def decode(self, tokens: Sequence[int], position: int) -> tuple[Floats, Floats]:
        """Evaluate up to `n_batch` tokens that follow the first `position` ones.

        Returns logits (n, vocab) and hidden states after the final norm (n, hidden), float32, as views that the next
        call overwrites. Raises EngineError.
        """
        count = len(tokens)
        self._batch.n_tokens = count
        self._tokens[:count] = tokens
        self._positions[:count] = range(position, position + count)
        code = self._api.llama_decode(self._context, self._batch)
        if code != 0:
            raise EngineError(f"llama.cpp failed to decode (code {code}): {llama().last_errors()}.")
        vocab_size, hidden_size = self._shape
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (count, vocab_size))
        hidden = np.ctypeslib.as_array(self._api.llama_get_embeddings(self._context), (count, hidden_size))
        if not np.isfinite(logits[-1]).all():
            raise EngineError(
                "The model produced values that are not numbers: the file or the llama.cpp build is damaged. "
                "`updraft doctor` checks the build."
            )
        return logits, hidden

    def close(self) -> None:
        if self._context:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._context)
        self._context = None
