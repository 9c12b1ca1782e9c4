"""Benchmarks of a GPU node: decoding at several batch sizes, overlapping steps, and escalations with a draft."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.engine.types.request import GenerationRequest
from ...cloud_engine.models.config import ModelConfig
from ...cloud_engine.models.decoder import Decoder
from ...cloud_engine.planning.roofline import BATCHES, CONTEXTS, GPUS, GpuSpec, predicted_decode
from ...protocol.sampling import SamplingParams
from ..shared.workload import WorkloadRequest
from .driving import engine_config, make_engine
from .host import LOGPROBS, PENALTY, PREDICTION
from .speculation import uniform_logits

#: Numbers of escalations at a time.
LOADS = (1, 16, 64)
_PROMPT, _OUTPUT = 128, 64
_MIXED = 64  # sequences of the mixed batch
_WRONG = 10  # every tenth token of a prediction is wrong
_ROUNDS = 3
_PARAMS = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True, repetition_detection=False)
_PLANNED_GPU = "NVIDIA H100 80GB HBM3"

#: Returns the seconds in which a peer serves requests, all at a time.
Peer = Callable[[Sequence[WorkloadRequest]], float]
Say = Callable[[str], None]


def batch_figures(
    model: Decoder, gpu: GpuSpec | None, peer: Peer | None, say: Say, batches: Sequence[int] = BATCHES
) -> dict[str, float]:
    """Measure decoding by number of sequences: `decode_tokens_per_s_*`, `graphs_over_eager_*` (speed with CUDA graphs
    over that without), with a `gpu` `roofline_share_*`, and with a `peer` `batch_over_peer_*`, prompts included."""
    figures: dict[str, float] = {}
    seconds: dict[int, float] = {}
    engine = _engine(model, max(batches))
    for size in batches:
        runs = [_serve(engine, _requests(model, size)) for _ in range(_ROUNDS)]
        seconds[size] = statistics.median(whole_s for whole_s, _ in runs)
        speed = figures[f"decode_tokens_per_s_{size}"] = statistics.median(speed for _, speed in runs)
        say(f"batch of {size}: {speed:,.0f} tokens/s")
        if gpu is not None:
            predicted = predicted_decode(model.config, gpu, size, _PROMPT + _OUTPUT // 2).tokens_per_s
            figures[f"roofline_share_{size}"] = speed / predicted
            say(f"batch of {size}: {speed / predicted:.0%} of the predicted {predicted:,.0f} tokens/s")
    del engine  # frees its memory
    eager = _engine(model, max(batches), enforce_eager=True)
    for size in batches:
        speed = statistics.median(_serve(eager, _requests(model, size))[1] for _ in range(_ROUNDS))
        ratio = figures[f"graphs_over_eager_{size}"] = figures[f"decode_tokens_per_s_{size}"] / speed
        say(f"batch of {size}: {ratio:.2f}x as fast with CUDA graphs as without")
    del eager
    if peer is None:
        return figures
    for size in batches:
        try:
            ratio = figures[f"batch_over_peer_{size}"] = peer(_requests(model, size)) / seconds[size]
        except RuntimeError as error:  # the other figures remain
            say(f"batch of {size}: transformers' continuous batching failed: {error}")
        else:
            say(f"batch of {size}: {ratio:.2f}x as fast as transformers' continuous batching")
    return figures


def overlap_figures(model: Decoder, sequences: int = _MIXED) -> dict[str, float]:
    """Return `overlap_share_mixed`, the share of steps launched before the last result is read, and `vain_row_share`.

    Of the requests, 10 % have a prediction, 5 % a penalty, and 5 % report log-probabilities.
    """
    engine = _engine(model, sequences)
    for number, request in enumerate(_requests(model, sequences)):
        share = 100 * number // sequences
        frequency_penalty, logprobs = 0.5 * (share in PENALTY), 1 if share in LOGPROBS else None
        params = replace(_PARAMS, frequency_penalty=frequency_penalty, logprobs=logprobs)
        prediction = [0] * _OUTPUT if share in PREDICTION else []
        engine.add_request(GenerationRequest(str(number), request.prompt, params, prediction))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    rows = sequences * (_PROMPT + _OUTPUT)
    return {"overlap_share_mixed": stats.overlapped_steps / stats.steps, "vain_row_share": stats.vain_rows / rows}


def escalation_figures(model: Decoder, say: Say, loads: Sequence[int] = LOADS) -> dict[str, float]:
    """Return `escalation_draft_over_without_*` by number of requests at a time: the time to complete answers with a
    prediction in which every tenth token is wrong, over the time without."""
    figures: dict[str, float] = {}
    prediction = [int(at % _WRONG == _WRONG - 1) for at in range(_OUTPUT)]
    with uniform_logits(model):
        engine = _engine(model, max(loads))
        for load in loads:
            requests = _requests(model, load)
            _serve(engine, requests, prediction)  # warm-up, in which the engine learns the acceptance
            ratios = [_serve(engine, requests, prediction)[0] / _serve(engine, requests)[0] for _ in range(_ROUNDS)]
            figures[f"escalation_draft_over_without_{load}"] = ratio = statistics.median(ratios)
            say(f"{load} at a time: {ratio:.2f} of the time without a draft")
    return figures


def roofline_figures(model: ModelConfig, say: Say) -> dict[str, float]:
    """Return what an H100's data sheet predicts for decoding: `predicted_tokens_per_s_*`, by batch and context."""
    figures: dict[str, float] = {}
    for batch in BATCHES:
        for context in CONTEXTS:
            predicted = predicted_decode(model, GPUS[_PLANNED_GPU], batch, context)
            figures[f"predicted_tokens_per_s_{batch}x{context}"] = predicted.tokens_per_s
            fits = "" if predicted.sequences == batch else f" ({predicted.sequences} fit)"
            say(
                f"predicted for an {_PLANNED_GPU}: batch of {batch}, context {context:,}{fits}: "
                f"{predicted.tokens_per_s:,.0f} tokens/s"
            )
    return figures


def _engine(model: Decoder, sequences: int, *, enforce_eager: bool = False) -> Engine:
    config = engine_config(sequences, sequences)
    return make_engine(model, replace(config, enable_prefix_caching=False, enforce_eager=enforce_eager))


def _requests(model: Decoder, number: int) -> list[WorkloadRequest]:
    vocabulary = model.config.vocab_size
    return [WorkloadRequest([(place + at) % vocabulary for at in range(_PROMPT)], _OUTPUT) for place in range(number)]


def _serve(engine: Engine, requests: Sequence[WorkloadRequest], prediction: Sequence[int] = ()) -> tuple[float, float]:
    """Return the seconds of all requests, and the tokens per second after their prompts are read."""
    started = time.perf_counter()
    for number, request in enumerate(requests):
        engine.add_request(GenerationRequest(str(number), request.prompt, _PARAMS, list(prediction)))
    engine.step()
    while engine.reads_prompts:
        engine.step()
    decoding, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    ended = time.perf_counter()
    return ended - started, tokens / (ended - decoding)
