"""Typed classes over llama_cpp's low-level functions: the library, and models with their tokenizers."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import threading
import unicodedata
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...protocol.errors import EngineError, InvalidRequestError, MissingDependencyError, ModelLoadError
from .kernels import check_switch, kernels_in_use

Floats = npt.NDArray[np.float32]
_LOG_ERROR, _LOG_CONTINUED = 4, 5
_LONGEST_PIECE = 4096  # maximum number of characters to tokenize at once
_BEFORE_SPACE, _AFTER_WORD = (re.compile(rf".*\w(?={after})", re.DOTALL) for after in (r" \w", r"\W"))
_loading = threading.Lock()


class Llama:
    """The loaded shared library: its functions as `api`, the Updraft kernels in use, and its last error lines."""

    def __init__(self) -> None:
        check_switch()  # before the import, because the library reads UPDRAFT_LLAMA_KERNELS while it loads
        try:
            from llama_cpp import llama_cpp as api
        except (ImportError, OSError, RuntimeError) as error:  # OSError, RuntimeError: the library does not load
            raise MissingDependencyError(
                f"The on-device engine needs llama-cpp-python, which cannot be imported ({error}). Install it with: "
                "python -m updraft.local_engine.llama.build --install"
            ) from error
        self.api: Any = api
        self.kernels = kernels_in_use(api._lib)
        self.errors: deque[str] = deque(maxlen=8)
        self._last_level = 0
        self.log_callback = callback = api.llama_log_callback(self._log)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # keeps the callback alive for the library's pointer
        api.llama_log_set(callback, ctypes.c_void_p(0))
        api.llama_backend_init()

    def _log(self, level: int, text: bytes, _: object) -> None:
        level = self._last_level if level == _LOG_CONTINUED else level
        self._last_level = level
        if level == _LOG_ERROR and text.strip():
            self.errors.append(text.decode("utf-8", "replace").strip())

    def last_errors(self) -> str:
        """Return llama.cpp's error lines since the last call, for an exception's message."""
        lines = "; ".join(self.errors)
        self.errors.clear()
        return lines or "llama.cpp gave no reason"


def llama() -> Llama:
    """Load the library on first use, once for all threads. Raises MissingDependencyError."""
    with _loading:  # `functools.cache` alone would let several threads load the library at once
        return _loaded()


@functools.cache
def _loaded() -> Llama:
    return Llama()


class LlamaModel:
    """Memory-mapped weights and the vocabulary of one GGUF file. Thread-safe."""

    def __init__(
        self, path: Path, *, gpu_layers: int | None = None, repack: bool = True, missing: frozenset[int] = frozenset()
    ) -> None:
        """`missing`: bytes without a token, from `plain_text.missing_bytes`. `gpu_layers` None: llama.cpp decides.

        Raises ModelLoadError with llama.cpp's message if llama.cpp rejects the file.
        """
        library = llama()
        self._api = api = library.api
        self._missing = missing
        self._readers = 0  # number of threads in calls that use the vocabulary; `close` waits for them
        self._changed = threading.Condition()
        library.last_errors()
        params = api.llama_model_default_params()
        params.load_mode = api.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = repack
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        self._model: Any = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelLoadError(f"llama.cpp cannot load {path}: {library.last_errors()}.")
        if api.llama_model_has_encoder(self._model) or not api.llama_model_has_decoder(self._model):
            self.close()
            raise ModelLoadError(f"{path} is not a decoder-only language model, so it cannot generate text.")
        self._vocab = api.llama_model_get_vocab(self._model)
        self._is_bpe = api.llama_vocab_type(self._vocab) == api.LLAMA_VOCAB_TYPE_BPE
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        self.hidden_size: int = api.llama_model_n_embd(self._model)
        self.parameters: int = api.llama_model_n_params(self._model)
        self.train_context: int = api.llama_model_n_ctx_train(self._model)
        self.is_recurrent: bool = api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model)
        # Keep all attributes, because reading them a second time for 150,000 tokens would slow down loading.
        attributes = list(map(api.llama_vocab_get_attr, itertools.repeat(self._vocab), range(self.vocab_size)))
        self._control = _tokens_with(attributes, api.LLAMA_TOKEN_ATTR_CONTROL)
        candidates = self._control.union(_named_ends(api, self._model, self._vocab))
        self.end_ids = frozenset(token for token in candidates if api.llama_vocab_is_eog(self._vocab, token))
        self._control_texts = {self._text(token): token for token in sorted(self._control)}
        self.control_tokens = tuple(self._control_texts)
        #: Tokens that the file does not mark as control tokens, but that llama.cpp recognizes in any text.
        self.user_defined = tuple(map(self._text, sorted(_tokens_with(attributes, api.LLAMA_TOKEN_ATTR_USER_DEFINED))))
        bos, eos = api.llama_vocab_bos(self._vocab), api.llama_vocab_eos(self._vocab)
        #: Texts of the BOS and EOS tokens; empty if the vocabulary has none.
        self.bos_text, self.eos_text = (self._text(token) if token >= 0 else "" for token in (bos, eos))
        #: `front`: BOS token that the file requires before every prompt; `back`: EOS token required after raw text.
        self.front = [bos] if api.llama_vocab_get_add_bos(self._vocab) and bos >= 0 else []
        self.back = [eos] if api.llama_vocab_get_add_eos(self._vocab) and eos >= 0 else []
        self.special_ids = self._control | _tokens_with(attributes, api.LLAMA_TOKEN_ATTR_UNKNOWN)

    @functools.cached_property
    def longest_token(self) -> int:
        """Number of characters in the longest token, so that n tokens have at most n times as many characters."""
        with self._open():
            return max(len(self._text(token)) for token in range(self.vocab_size))

    def _text(self, token: int) -> str:
        return self._api.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")

    def special_id(self, text: str) -> int | None:
        """Return the id of the control token spelled `text`; None if the model has no such token."""
        return self._control_texts.get(text)

    def tokenize(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the token ids of `text`, without BOS and EOS. `allow_special`: recognize control tokens in `text`.

        Raises InvalidRequestError for a character that the vocabulary cannot represent.
        """
        raw = text.encode("utf-8", "replace")
        if self._missing and not allow_special and not self._missing.isdisjoint(raw):
            self._refuse_unwritable(text)
        if self._is_bpe and len(text) > _LONGEST_PIECE:
            pieces = (piece.encode("utf-8", "replace") for piece in _pieces(text))
            return [token for piece in pieces for token in self._tokenize(piece, allow_special)]
        return self._tokenize(raw, allow_special)

    def _tokenize(self, raw: bytes, allow_special: bool) -> list[int]:
        capacity = len(raw) + 2
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            with self._open() as api:
                count = api.llama_tokenize(self._vocab, raw, len(raw), buffer, capacity, False, allow_special)
            if count >= 0:
                break
            if not capacity < -count < 2**31 - 1:
                raise EngineError(f"llama.cpp could not tokenize {len(raw)} bytes (code {count}).")
            capacity = -count  # a text can have more tokens than bytes, because a space may take three tokens
        tokens = buffer[:count]
        if tokens and min(tokens) < 0:
            raise InvalidRequestError("The vocabulary has no token for this text, and none for unknown text.")
        return tokens

    def _refuse_unwritable(self, text: str) -> None:
        """Reject characters without a token. Control and unassigned characters are dropped, as in other libraries."""
        for character in set(text):
            lost = not self._missing.isdisjoint(character.encode("utf-8", "replace"))
            if lost and (character in "\t\n\r" or unicodedata.category(character) not in ("Cc", "Cn")):
                raise InvalidRequestError(
                    f"The model's vocabulary has no token for U+{ord(character):04X}: leave the character out, or use "
                    "another model.",
                    param="messages",
                    code="invalid_value",
                )

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of a token; empty for a control token if `skip_special`. Raises InvalidRequestError."""
        if not 0 <= token < self.vocab_size:  # llama.cpp would abort the process
            raise InvalidRequestError(f"There is no token {token}: the model has {self.vocab_size:,} tokens.")
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

    def handle(self) -> Any:
        """Return the `llama_model *`, valid until `close`. Raises EngineError after `close`."""
        with self._open():
            return self._model

    def close(self) -> None:
        """Unmap the weights as soon as no thread uses the vocabulary. The caller must close all contexts first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            if self._model:
                self._api.llama_model_free(self._model)
            self._model = None

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with self._changed:
            if not self._model:
                raise EngineError("The local engine is closed.")
            self._readers += 1
        try:
            yield self._api
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most `_LONGEST_PIECE` characters, if possible where tokenizers split words anyway.

    llama.cpp splits words with std::regex, whose recursion takes up to 1 kB of stack per character of a match: some
    10,000 letters without a space would crash the process.
    """
    start = 0
    while len(text) - start > _LONGEST_PIECE:
        limit = start + _LONGEST_PIECE
        word = _BEFORE_SPACE.match(text, start, limit) or _AFTER_WORD.match(text, start, limit)
        end = word.end() if word else limit
        yield text[start:end]
        start = end
    yield text[start:]


def _tokens_with(attributes: list[int], attribute: int) -> frozenset[int]:
    """Return the tokens that have the attribute."""
    return frozenset(token for token, value in enumerate(attributes) if value & attribute)


def _named_ends(api: Any, model: Any, vocab: Any) -> Iterator[int]:
    """Yield the end-of-answer tokens that the file names, some of which are not control tokens. All other end-of-answer
    tokens, which llama.cpp recognizes by their text, are control tokens."""
    for name in ("eos", "eot", "fim_pad", "fim_rep", "fim_sep"):
        token: int = getattr(api, f"llama_vocab_{name}")(vocab)
        if token >= 0:
            yield token
    number = ctypes.create_string_buffer(16)  # the "end of message" token, for which llama.cpp has no function
    if api.llama_model_meta_val_str(model, b"tokenizer.ggml.eom_token_id", number, len(number)) > 0:
        yield int(number.value)
