"""A llama.cpp context: tokens of many sequences in, logits and hidden states out, and a KV cache between steps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...kernels.runtime.contention import ThreadGovernor
from ...protocol.errors import EngineError, ModelLoadError
from ..machine.memory_fit import KvCacheType
from .library import Floats, LlamaModel, llama

_NO_KV_SLOT = 1


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A GGUF file of low-rank changes to the weights (Hu et al. 2021), and the strength at which they apply."""

    path: Path | str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Parameters of a context.

    On a CPU, flash attention rounds to half precision whatever the cache type. With an f32 cache and no flash
    attention, log-probabilities of a float32 model match torch within 1e-4 instead of about 1e-2.
    """

    # Number of KV cache cells, one per token. All sequences share the cells, or each has an equal part (`separate`).
    n_ctx: int
    # Maximum tokens per call.
    n_batch: int
    # Maximum number of tokens per call that get logits.
    n_outputs: int
    # Number of sequence ids; the ids start at 0.
    n_sequences: int
    # Maximum threads; fewer run while other processes need the processors.
    n_threads: int
    kv_cache_type: KvCacheType
    # Whether to use flash attention. None: llama.cpp decides.
    flash_attention: bool | None
    separate: bool = False
    adapters: Sequence[LoraAdapter] = ()


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens of one sequence at positions from `start` on; the last `outputs` tokens get logits."""

    sequence: int
    start: int
    tokens: Sequence[int]
    outputs: int


class NoKvSlotError(Exception):
    """llama.cpp found no free cells for a batch; the cache is unchanged."""


class LlamaContext:
    """A llama.cpp context that implements `KVMemory`. Not thread-safe. `threads`: number of threads in the last call.

    Hidden states are taken after the final norm. llama.cpp returns them only if every token of a call gets logits.
    """

    def __init__(self, model: LlamaModel, options: ContextOptions) -> None:
        """Raise ModelLoadError if the KV cache does not fit into memory or an adapter is unusable."""
        library, handle = llama(), model.handle()
        self._api = api = library.api
        self.threads = options.n_threads
        self._governor = ThreadGovernor(options.n_threads)
        library.last_errors()
        self._context: Any = api.llama_init_from_model(handle, _parameters(api, options))
        if not self._context:
            raise ModelLoadError(
                f"llama.cpp cannot create a context of {options.n_ctx} tokens: {library.last_errors()}. "
                "Lower max_model_len, or set another kv_cache_type."
            )
        try:
            self._adapt(handle, options.adapters)
        except BaseException:
            self.close()
            raise
        self._memory = api.llama_get_memory(self._context)
        self._logits = _Outputs(api.llama_get_logits, model.vocab_size)
        self._hidden = _Outputs(api.llama_get_embeddings, model.hidden_size)
        self._batch = _Batch(api, options.n_batch)
        self._is_asynchronous: bool = api.llama_supports_gpu_offload()
        self._gives_hidden = True

    def share(self, source: int, target: int, length: int) -> None:
        """Make the empty sequence `target` share the first `length` tokens of `source`, in the same cells.

        A recurrent state is copied whole, so `length` must be the whole length of `source`.
        """
        self._api.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def remove(self, sequence: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        self._api.llama_memory_clear(self._memory, False)

    def decode(self, rows: Sequence[TokenRows]) -> tuple[Floats, Floats | None]:
        """Evaluate at most `n_batch` tokens of any sequences.

        Returns the requested logits (n, vocab) in order and, if every token gets logits, the hidden states (n, hidden),
        else None. Both are float32 views that the next call overwrites. Raises NoKvSlotError, EngineError.
        """
        tokens, outputs = self._batch.fill(rows)
        self._want_hidden(tokens == outputs)
        if (threads := self._governor.threads()) != self.threads:
            self.threads = threads
            self._api.llama_set_n_threads(self._context, threads, threads)
        code = self._api.llama_decode(self._context, self._batch.struct)
        if code == _NO_KV_SLOT:
            raise NoKvSlotError
        if code != 0:
            raise EngineError(f"llama.cpp failed to decode (code {code}): {llama().last_errors()}.")
        if outputs == 0 or self._is_asynchronous:
            self._api.llama_synchronize(self._context)
        logits = self._logits.rows(self._context, outputs)
        return logits, self._hidden.rows(self._context, outputs) if tokens == outputs else None

    def _want_hidden(self, enabled: bool) -> None:
        """Switch hidden states on or off. Unchanged values are skipped, because llama.cpp logs each call to Python."""
        if enabled != self._gives_hidden:
            self._api.llama_set_embeddings(self._context, enabled)
            self._gives_hidden = enabled

    def close(self) -> None:
        if self._context:
            self._api.llama_free(self._context)
        self._context = None

    def _adapt(self, model: Any, adapters: Sequence[LoraAdapter]) -> None:
        if not adapters:
            return
        api = self._api
        loaded = [api.llama_adapter_lora_init(model, os.fsencode(adapter.path)) for adapter in adapters]
        for adapter, handle in zip(adapters, loaded, strict=True):
            if not handle:
                raise ModelLoadError(f"llama.cpp cannot apply the adapter {adapter.path}: {llama().last_errors()}.")
        handles = (api.llama_adapter_lora_p_ctypes * len(loaded))(*loaded)
        scales = (ctypes.c_float * len(loaded))(*(adapter.scale for adapter in adapters))
        code = api.llama_set_adapters_lora(self._context, handles, len(loaded), scales)
        if code != 0:
            raise ModelLoadError(f"llama.cpp cannot apply the adapters (code {code}): {llama().last_errors()}.")


class _Outputs:
    """Views of llama.cpp's output buffer, whose address stays the same until a step needs a larger buffer."""

    def __init__(self, function: Any, width: int) -> None:
        """`function` takes a context and returns a pointer to its output rows of `width` floats."""
        self._function = _keeping_gil(function)
        self._width = width
        self._known: tuple[int, int] | None = None
        self._view = np.empty((0, width), np.float32)

    def rows(self, context: Any, count: int) -> Floats:
        """Return the rows (count, width) of a step with `count` outputs."""
        if count == 0:
            return np.empty((0, self._width), np.float32)
        pointer = self._function(context)
        place = ctypes.addressof(pointer.contents), count
        if place != self._known:
            self._known, self._view = place, np.ctypeslib.as_array(pointer, (count, self._width))
        return self._view


def _keeping_gil(function: Any) -> Any:
    """Return the C function in a form that keeps the GIL, for calls that take microseconds.

    If a call released the GIL, a busy thread might keep the GIL for 5 ms (`sys.getswitchinterval`).
    """
    prototype = ctypes.PYFUNCTYPE(function.restype, *function.argtypes)
    address: Any = ctypes.cast(function, ctypes.c_void_p).value
    return prototype(address)


class _Batch:
    """A `llama_batch` over numpy arrays, so that whole rows are written at once."""

    def __init__(self, api: Any, size: int) -> None:
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._counts, self._outputs = np.ones(size, np.int32), np.zeros(size, np.int8)
        start, step = self._sequences.ctypes.data, self._sequences.itemsize
        self._pointers = (start + step * np.arange(size)).astype(np.uintp)  # row i points to entry i of `_sequences`
        self.struct = api.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._outputs),
        ):
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, type(getattr(self.struct, name))))

    def fill(self, rows: Sequence[TokenRows]) -> tuple[int, int]:
        """Write the rows into the batch; return the number of tokens and the number of outputs."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        outputs: list[int] = []
        for part in rows:
            count = len(part.tokens)
            tokens += part.tokens
            positions += range(part.start, part.start + count)
            sequences += [part.sequence] * count
            outputs += [0] * (count - part.outputs) + [1] * part.outputs
        self.struct.n_tokens = count = len(tokens)
        self._tokens[:count], self._positions[:count] = tokens, positions
        self._sequences[:count], self._outputs[:count] = sequences, outputs
        return count, sum(outputs)


def _parameters(api: Any, options: ContextOptions) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_outputs_max = options.n_ctx, options.n_sequences, options.n_outputs
    params.n_batch = params.n_ubatch = options.n_batch
    params.n_threads = params.n_threads_batch = options.n_threads
    params.type_k = params.type_v = getattr(api, f"GGML_TYPE_{options.kv_cache_type.upper()}")
    if options.flash_attention is not None:
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if options.flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
    params.kv_unified = not options.separate
    params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
    params.embeddings = True  # reserve memory for hidden states from the start
    return params
