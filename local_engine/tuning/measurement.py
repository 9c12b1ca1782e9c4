"""Program that measures one choice of settings; `search` starts it in a subprocess for each candidate."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import msgspec

from ...protocol.decoding import prepare_types
from ...protocol.errors import ModelLoadError
from ..llama.library import llama
from ..machine.child_process import expect_crashes

_SLICES = 4


class MeasurementJob(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    threads: int
    ubatch: int
    repack: bool
    kv_cache_type: str
    flash_attention: bool
    prompt: int  # number of prompt tokens, computed in one call
    seconds: float  # total time for the steps that compute one token each


class Speeds(msgspec.Struct, frozen=True):
    """Tokens per second while reading the prompt and while answering, one number per measurement."""

    prompt: list[float]
    answer: list[float]


prepare_types(MeasurementJob, Speeds)


def measure(job: MeasurementJob) -> Speeds:
    """Measure the speeds. Raises ModelLoadError if llama.cpp rejects the model or the settings."""
    run = _Run(job)
    run.decode(min(8, job.ubatch))  # the first step reads the weights into memory
    answer = [run.answer_speed(job.seconds / _SLICES) for _ in range(_SLICES)]
    prompt = [run.prompt_speed(job.prompt) for _ in range(2)]
    return Speeds(prompt, answer)


class _Run:
    def __init__(self, job: MeasurementJob) -> None:
        library = llama()
        self._api = api = library.api
        params = api.llama_model_default_params()
        params.load_mode, params.use_extra_bufts = api.LLAMA_LOAD_MODE_MMAP, job.repack
        model: Any = api.llama_model_load_from_file(os.fsencode(job.path), params)
        if not model:
            raise ModelLoadError(f"llama.cpp cannot load {job.path}: {library.last_errors()}.")
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = 2048, max(512, job.prompt), job.ubatch
        options.n_threads = options.n_threads_batch = job.threads
        options.type_k = options.type_v = getattr(api, f"GGML_TYPE_{job.kv_cache_type.upper()}")
        options.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_AUTO if job.flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context: Any = api.llama_init_from_model(model, options)
        if not self._context:
            raise ModelLoadError(f"llama.cpp cannot use these settings: {library.last_errors()}.")
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(options.n_batch, 0, 1)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._position = 0

    def decode(self, count: int) -> None:
        """Compute `count` tokens at once, with logits for the last token."""
        batch = self._batch
        batch.n_tokens = count
        for index in range(count):
            batch.token[index], batch.pos[index] = (self._position * 7 + 1) % self._vocabulary, self._position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index == count - 1
            self._position += 1
        if self._api.llama_decode(self._context, batch) != 0:
            raise ModelLoadError(f"llama.cpp cannot decode with these settings: {llama().last_errors()}.")
        self._api.llama_get_logits_ith(self._context, -1)

    def answer_speed(self, seconds: float) -> float:
        started, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds or count == 0:
            if self._position >= 1500:
                self._forget()
            self.decode(1)
            count += 1
        return count / (time.perf_counter() - started if count == 1 else passed)

    def prompt_speed(self, count: int) -> float:
        self._forget()
        started = time.perf_counter()
        self.decode(count)
        return count / (time.perf_counter() - started)

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._memory, False)
        self._position = 0


if __name__ == "__main__":
    expect_crashes()
    try:
        result = msgspec.to_builtins(measure(msgspec.convert(json.loads(sys.argv[1]), MeasurementJob)))
    except ModelLoadError as error:
        result = {"error": error.message}
    sys.stdout.write(json.dumps(result) + "\n")
