"""Generation of several tokens per sequence in one call of C, for the drafts of a draft model.

A forward pass of such a small model takes less time than Python needs to prepare it.
"""

# torch leaves `from_numpy` and `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..attention.cpu import NativeAttention
from ..attention.ragged_batch import Passes
from ..kv_cache.types import Rotation
from ..linear.cpu import NativeLinear
from ..runtime.native_library import call_fields, loaded
from ..sampling.cpu import SampleCall, sample_call
from ..sampling.gumbel_noise import noise_keys
from ..sampling.types import Sampling, check_sampling
from .cpu import DecoderCall, NativeDecoder


class _ContinuationCall(ctypes.Structure):
    """The C struct `ContinuationCall` of native/continuation.c."""

    _fields_ = (
        ("decoder", ctypes.POINTER(DecoderCall)),
        ("sampling", ctypes.POINTER(SampleCall)),
        *call_fields("embeddings lookup first live", "passes", "embedding_scale"),
    )


class NativeContinuation:
    """Continues sequences with a decoder, its head and its embeddings, which are multiplied by `scale`.

    `embeddings` (vocabulary, size), plain or packed: the head itself if they are tied. C keeps pointers: tensors must
    not move.
    """

    def __init__(
        self, decoder: NativeDecoder, head: NativeLinear, embeddings: Tensor | NativeLinear, scale: float
    ) -> None:
        """Raise ConfigurationError if the weights do not fit together."""
        is_same = head.shape == tuple(embeddings.shape) and head.dtype == embeddings.dtype
        if not is_same or (isinstance(embeddings, Tensor) and not embeddings.is_contiguous()):
            raise ConfigurationError("The embeddings must be contiguous and have the shape and dtype of the head.")
        self._library = loaded()
        self._decoder, self._head, self._embeddings, self._scale = decoder, head, embeddings, scale

    def run(
        self,
        first: Sequence[int],
        passes: Passes,
        rotations: tuple[Rotation, Rotation],
        attention: NativeAttention,
        sampling: Sampling,
    ) -> list[list[int]]:
        """Generate tokens after each sequence's token in `first`, one for each row of the sequence's span.

        `attention` must be made for `passes.batch`, `rotations` for the rows of `passes`, and `sampling` for the first
        pass, without mask and typical-p. If rounding decides between tokens, the likeliest is taken. Raises
        ConfigurationError for arguments that do not fit.
        """
        rows, (vocabulary, size) = len(first), self._head.shape
        if rows != passes.live[0] or not all(0 <= token < vocabulary for token in first):
            raise ConfigurationError(f"Continuation needs {passes.live[0]} token ids below {vocabulary}.")
        hidden = torch.empty(rows, size, dtype=self._head.dtype)
        logits = torch.empty(rows, vocabulary, dtype=self._head.dtype)
        self._decoder.check(hidden, len(passes.row), rotations, attention)
        check_sampling(logits, sampling)
        if sampling.mask is not None or sampling.typical_p is not None:
            raise ConfigurationError("The C continuation supports no grammar masks and no typical-p sampling.")
        out, slots = torch.empty_like(hidden), passes.slots()
        sequences = _single_row_sequences(passes)
        attention.heads_call.slots = slots.ctypes.data
        attention.attention_call.sequences = sequences.ctypes.data
        decoder = self._decoder.call(hidden, out, rotations, attention)
        scratch = self._decoder.scratch(decoder)
        decoder.scratch, decoder.head, decoder.logits = scratch.data_ptr(), self._head.address, logits.data_ptr()
        keys = noise_keys(sampling.seeds[torch.from_numpy(passes.sequence)], torch.from_numpy(passes.positions() + 1))
        chosen = torch.empty(len(keys), dtype=torch.int64)
        tokens = np.array(first, dtype=np.int64)
        call = _ContinuationCall(
            decoder=ctypes.pointer(decoder),
            sampling=ctypes.pointer(sample_call(logits, sampling, keys, chosen)),
            embeddings=self._embeddings.data_ptr() if isinstance(self._embeddings, Tensor) else None,
            lookup=self._embeddings.address if isinstance(self._embeddings, NativeLinear) else None,
            first=tokens.ctypes.data,
            live=passes.live.ctypes.data,
            passes=len(passes.live),
            embedding_scale=self._scale,
        )
        if self._library.continuation(ctypes.byref(call)):
            raise RuntimeError("the C attention kernel does not support this cache")
        continued: list[list[int]] = [[] for _ in first]
        for sequence, token in zip(passes.sequence.tolist(), chosen.tolist(), strict=True):
            continued[sequence].append(token)
        return continued


def _single_row_sequences(passes: Passes) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the `sequences` arrays of `AttentionCall` for all passes, concatenated. Each sequence has one row."""
    sequence = passes.sequence
    return np.stack((sequence, passes.positions(), np.ones_like(sequence), passes.batch.table[sequence]), axis=1)
