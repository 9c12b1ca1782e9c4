"""Peers that run a GGUF file from Python: llama.cpp's bare functions, `llama_cpp.Llama`, and HTTP servers.

Each peer runs with our settings where it supports them, and with its own best settings otherwise.
"""

from __future__ import annotations

import importlib.util
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from ...local_engine.llama.library import llama
from ...protocol.errors import EngineError, ModelLoadError
from ...protocol.safety.system import python_command
from ..gateway.servers import free_port

BATCH = 512  # tokens of a prompt computed at once; the default of all peers
_SERVER_NEEDS = ("pydantic_settings", "sse_starlette", "starlette_context")
_START_S, _ANSWER_S = 120.0, 600.0
_SHARED_CONTEXT = 4096  # context length for all streams together, for peers with several streams


@dataclass(frozen=True, slots=True)
class Setup:
    """Options shared by all engines. `context_length`: in tokens; KV caches are f16, with flash attention."""

    path: Path
    context_length: int
    threads: int


class Peer(Protocol):
    """An engine that answers whole prompts, greedily, from any thread."""

    def answer(self, prompt: str, max_tokens: int, logprobs: int | None = None) -> int:
        """Return the number of tokens written, each with its `logprobs` most likely alternatives if requested."""
        ...


class RawLlama:
    """llama.cpp's functions in the plainest loop: an upper bound for engines on top of it. Not thread-safe."""

    def __init__(self, setup: Setup, streams: int = 1) -> None:
        """Load the model into llama.cpp. Raises ModelLoadError if llama.cpp rejects it."""
        library = llama()
        self._api = api = library.api
        self._model: Any = api.llama_model_load_from_file(str(setup.path).encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = _SHARED_CONTEXT, BATCH, BATCH
        params.n_seq_max, params.kv_unified = streams, True
        params.n_threads = params.n_threads_batch = setup.threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context: Any = api.llama_init_from_model(self._model, params) if self._model else None
        if not self._context:
            raise ModelLoadError(f"llama.cpp cannot load {setup.path}: {library.last_errors()}.")
        self._vocabulary: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH, 0, 1)

    def steps(self, prompts: Sequence[Sequence[int]], count: int) -> Iterator[list[int]]:
        """Yield greedy answers of `count` tokens, one token per answer and step, past end-of-turn tokens.

        Prompts have at most `BATCH` tokens and are computed one by one.
        """
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        tokens = [self._prefill(number, prompt) for number, prompt in enumerate(prompts)]
        for step in range(count - 1):
            yield tokens
            for number, (token, prompt) in enumerate(zip(tokens, prompts, strict=True)):
                self._put(number, token, len(prompt) + step, sequence=number, output=True)
            tokens = self._decode(len(tokens))
        yield tokens

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        for index, token in enumerate(prompt):
            self._put(index, token, index, sequence=sequence, output=index == len(prompt) - 1)
        return self._decode(len(prompt), outputs=1)[0]

    def _put(self, row: int, token: int, position: int, *, sequence: int, output: bool) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, output
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence

    def _decode(self, rows: int, outputs: int | None = None) -> list[int]:
        """Decode the first `rows` rows of the batch, and return the most likely token after each row that has logits.

        `outputs`: number of rows that have logits; None for all.
        """
        self._batch.n_tokens = rows
        if self._api.llama_decode(self._context, self._batch) != 0:
            raise EngineError(f"llama.cpp failed to decode: {llama().last_errors()}.")
        logits = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (outputs or rows, self._vocabulary)).argmax(axis=1).tolist()


class LlamaCppPython:
    """`llama_cpp.Llama`, which serves one request at a time, behind a lock as in its server."""

    def __init__(self, setup: Setup, *, logprobs: bool = False) -> None:
        """`logprobs`: whether requests may ask for log-probabilities, which slows the model down."""
        from llama_cpp import Llama

        self._lock = threading.Lock()
        self._llama = Llama(
            str(setup.path),
            n_ctx=setup.context_length,
            n_batch=BATCH,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            flash_attn=True,
            logits_all=logprobs,
            verbose=False,
        )

    def answer(self, prompt: str, max_tokens: int, logprobs: int | None = None) -> int:
        with self._lock:
            done: Any = self._llama.create_completion(prompt, max_tokens=max_tokens, temperature=0.0, logprobs=logprobs)
        return done["usage"]["completion_tokens"]

    def close(self) -> None:
        self._llama.close()


class Server:
    """A running OpenAI-compatible server. Answers are not streamed, which avoids the overhead of chunks."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def answer(self, prompt: str, max_tokens: int, logprobs: int | None = None) -> int:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": logprobs}
        reply = self.client.post("/v1/completions", json={k: v for k, v in body.items() if v is not None})
        return reply.raise_for_status().json()["usage"]["completion_tokens"]


def has_llama_cpp_server() -> bool:
    """Return whether the requirements of llama-cpp-python's server are installed (its extra `[server]`)."""
    return all(importlib.util.find_spec(name) for name in _SERVER_NEEDS)


def llama_cpp_server(setup: Setup, *, logprobs: bool) -> AbstractContextManager[Server]:
    """Run llama-cpp-python's server, changed so that a new request does not interrupt the running one."""
    threads = str(setup.threads)
    command = python_command("-m", "llama_cpp.server", "--model", str(setup.path), "--n_batch", str(BATCH))
    command += ["--n_ctx", str(setup.context_length), "--n_threads", threads, "--n_threads_batch", threads]
    command += ["--flash_attn", "true", "--logits_all", str(logprobs), "--interrupt_requests", "false"]
    return _serving([*command, "--verbose", "false", "--host", "127.0.0.1"])


def llama_server(binary: Path, setup: Setup, streams: int) -> AbstractContextManager[Server]:
    """Run llama.cpp's own server, with a slot per stream."""
    threads = str(setup.threads)
    command = [str(binary), "-m", str(setup.path), "-c", str(_SHARED_CONTEXT), "-np", str(streams)]
    command += ["-b", str(BATCH), "-t", threads, "-tb", threads, "-fa", "on", "--host", "127.0.0.1"]
    return _serving(command)


@contextmanager
def _serving(command: Sequence[str]) -> Iterator[Server]:
    """Run `command --port N`, from readiness to the end of the block. Raises EngineError if it never gets ready."""
    port = free_port()
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_ANSWER_S, trust_env=False) as client:
                _wait_until_ready(process, client, command)
                yield Server(client)
        finally:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client, command: Sequence[str]) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/v1/models").is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    how = "took too long to start" if process.poll() is None else f"exited with code {process.returncode}"
    raise EngineError(f"The server {how}: {' '.join(command)}")
