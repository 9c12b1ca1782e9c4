"""`updraft bench engine`: our engine and its peers on the same weights and requests, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from ...cloud_engine.models.decoder import Decoder
from ...cloud_engine.models.loading.loader import load_model
from ...cloud_engine.planning.roofline import GPUS
from ...kernels.runtime.host_memory import keep_freed_memory
from ...protocol.errors import ConfigurationError
from ..shared.workload import Workload, WorkloadRequest, draw
from . import host, peers, speculation
from .batches import batch_figures, escalation_figures, overlap_figures, roofline_figures
from .ceilings import MatrixProducts
from .driving import engine_config
from .formats import format_figures
from .invariance import invariance_figures
from .ranks import rank_figures
from .scheduling import kv_waste, step_rows
from .shapes import SHAPES, model_folder, random_model, shape_config
from .speed import (
    DTYPES,
    decode_figures,
    prefill_figures,
    prefix_figures,
    sampled_over_greedy,
    serving_time,
    start_figures,
)
from .step_gaps import step_gaps
from .step_times import measured_step_time, simulation_errors

#: Settings to try with transformers' continuous batching: (blocks of 256 tokens, tokens per step). The best one counts.
CB_SETTINGS = ((64, 512), (128, 1024), (128, 2048))
#: Settings to try on a CUDA device, which has more memory.
CB_SETTINGS_CUDA = ((1024, 4096), (1024, 8192))
_PLANNED_SHAPE = "llama-3.1-8b"  # of the roofline
Say = Callable[[str], None]
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    # Folder in which the model of `shape` is written for the peers.
    model_dir: Path
    # `pocket`, or a name in `SHAPES` for random weights.
    shape: str = "pocket"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    workload: Workload = field(default_factory=Workload)
    # Maximum number of sequences that run at once.
    running: int = 32
    threads: int | None = None
    device: str = "cpu"
    # Batching modes of transformers to compare with.
    peers: Literal["all", "static", "continuous", "none"] = "all"
    # Groups of figures to measure, from `GROUPS`; empty for every group the device supports.
    only: Sequence[str] = ()
    # Name in `SHAPES` for the draft model of group `oracle`; None: `pocket`.
    draft_shape: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigurationError for unknown groups, groups that the device does not support, and unknown shapes."""
        for group in self.only:
            if group not in GROUPS:
                raise ConfigurationError(f"Unknown group {group!r}: choose from {', '.join(GROUPS)}.", param="only")
            if group in _NOT_ON.get(self.device, ()):
                raise ConfigurationError(f"{group!r} cannot be measured on {self.device}.", param="only")
        for shape in filter(None, (self.shape, self.draft_shape)):
            if shape != "pocket" and shape not in SHAPES:
                names = ", ".join(("pocket", *SHAPES))
                raise ConfigurationError(f"Unknown shape {shape!r}: choose from {names}.", param="shape")

    @property
    def groups(self) -> list[str]:
        """Groups to measure, in order of measurement."""
        unwanted = {*_NOT_ON.get(self.device, ()), *(("peers",) if self.peers == "none" else ())}
        return [group for group in GROUPS if (group in self.only if self.only else group not in unwanted)]


def measure(options: EngineBenchOptions, say: Say, keep: Callable[[Figures], None] = lambda _: None) -> Figures:
    """Return figures by name; `vs_*`: our speed over the peer's. `keep` is called with all figures after each group."""
    keep_freed_memory()  # as a deployed engine does; the peers benefit too
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    bench, figures = _EngineBench(options, say), Figures()
    for group in options.groups:
        new = GROUPS[group](bench)
        say(f"{group}: " + ", ".join(f"{name} {value:.4g}" for name, value in new.items()))
        figures |= new
        keep(figures)
    return figures


class _EngineBench:
    """Measures groups of figures. The model, engines and requests that groups share are built on first use."""

    def __init__(self, options: EngineBenchOptions, say: Say) -> None:
        self.options, self.say = options, say

    @cached_property
    def folder(self) -> Path:
        return model_folder(self.options.shape, self.options.model_dir)

    @cached_property
    def _model_and_products(self) -> tuple[Decoder, MatrixProducts]:
        """Build the model and its matrix products before any engine rearranges the weights."""
        options = self.options
        needs_folder = not {"start", "invariance", "peers"}.isdisjoint(options.groups)  # peers and children load it
        if needs_folder or options.shape == "pocket":
            model = load_model(self.folder, dtype=DTYPES[options.dtype], device=options.device)
        else:
            model = random_model(shape_config(options.shape), DTYPES[options.dtype], torch.device(options.device))
        return model, MatrixProducts(model)

    @property
    def model(self) -> Decoder:
        return self._model_and_products[0]

    @property
    def products(self) -> MatrixProducts:
        return self._model_and_products[1]

    @cached_property
    def _requests(self) -> list[WorkloadRequest]:
        requests = draw(self.options.workload, self.model.config.vocab_size)
        tokens = sum(request.output for request in requests)
        self.say(f"{len(requests)} requests, {sum(len(a.prompt) for a in requests):,} tokens in, {tokens:,} out")
        return requests

    def throughput(self) -> Figures:
        requests = self._requests
        tokens = sum(request.output for request in requests)
        own_s = self._throughput()
        ceiling_s = self.products.seconds(step_rows(requests, engine_config(len(requests), self.options.running)))
        return {"tokens_per_s": tokens / own_s, "output_tokens": tokens, "matmul_ceiling_share": ceiling_s / own_s}

    def sampled(self) -> Figures:
        running = self.options.running
        return {"sampled_over_greedy": sampled_over_greedy(self.model, self._requests[:running], running)}

    def invariance(self) -> Figures:
        count = self.options.running if self.options.shape == "pocket" else 8
        return invariance_figures(self.folder, DTYPES[self.options.dtype], self._requests[:count])

    def batches(self) -> Figures:
        options, peer = self.options, None
        if options.peers in ("all", "continuous"):
            dtype, shape = DTYPES[options.dtype], SHAPES.get(options.shape)
            model = peers.random(shape, dtype, options.device) if shape else self._peer_of_folder()
            peer = partial(peers.continuous_batch, model)
        gpu = GPUS.get(torch.cuda.get_device_name()) if options.device == "cuda" else None
        return batch_figures(self.model, gpu, peer, self.say)

    def roofline(self) -> Figures:
        shape = self.options.shape
        return roofline_figures(shape_config(_PLANNED_SHAPE if shape == "pocket" else shape), self.say)

    def oracle_drafts(self) -> Figures:
        options = self.options
        target = self.model if options.shape != "pocket" else speculation.oracle_target(self.model)
        draft = speculation.draft_of(target, options.draft_shape or "pocket")
        figures = speculation.oracle_figures(target, draft, speculation.ACCEPTANCES)
        if options.device == "cuda":
            figures |= speculation.oracle_under_load(target, draft)
        return figures

    def peer_ratios(self) -> Figures:
        options = self.options
        model = self._peer_of_folder()
        against = _PeerRatios(self._throughput, self.say)
        figures = Figures()
        if options.peers in ("all", "static"):
            name = f"static batches of {options.running}"
            ratio = against.ratio(lambda: peers.static_batches(model, self._requests, options.running), name)
            figures["vs_transformers_static"] = ratio
        if options.peers in ("all", "continuous"):
            figures |= self._continuous_batching_ratios(model, against)
        return figures

    def _peer_of_folder(self) -> Any:
        return peers.load(self.folder, DTYPES[self.options.dtype], self.options.device)

    def _continuous_batching_ratios(self, model: Any, against: _PeerRatios) -> Figures:
        """Return our speed over that of continuous batching with its best setting. Settings that fail are skipped."""
        ratios: list[float] = []
        for blocks, tokens in cb_settings(self.options.device):
            name = f"continuous batching, {blocks} blocks, {tokens} tokens"
            run = partial(peers.continuous_batching, model, self._requests, blocks, tokens)
            try:
                ratios.append(against.ratio(run, name))
            except RuntimeError as error:
                self.say(f"transformers, {name}: failed: {error}")
        if not ratios:
            raise RuntimeError("transformers' continuous batching failed with every setting")
        return {"vs_transformers_cb": min(ratios)}

    def _throughput(self) -> float:
        return serving_time(self.model, self._requests, self.options.running)


class _PeerRatios:
    """Ratios of the peers' seconds to our engine's. Our engine is timed before and after, as speed varies."""

    def __init__(self, engine: Callable[[], float], say: Say) -> None:
        self._engine, self._say = engine, say
        self._last_s = engine()

    def ratio(self, peer: Callable[[], float], name: str) -> float:
        before_s, peer_s = self._last_s, peer()
        self._last_s = self._engine()
        ratio = peer_s / statistics.mean((before_s, self._last_s))
        self._say(f"transformers, {name}: {ratio:.2f}x our time")
        return ratio


def cb_settings(device: str) -> Sequence[tuple[int, int]]:
    return CB_SETTINGS_CUDA if device == "cuda" else CB_SETTINGS


#: Groups of figures by name, in order of measurement.
GROUPS: Mapping[str, Callable[[_EngineBench], Figures]] = {
    "start": lambda it: start_figures(it.folder, it.options.dtype, it.options.device),
    "throughput": _EngineBench.throughput,
    "sampled": _EngineBench.sampled,
    "decode": lambda it: decode_figures(it.model, it.products.weight_bytes),
    "batches": _EngineBench.batches,
    "overlap": lambda it: overlap_figures(it.model),
    "escalation": lambda it: escalation_figures(it.model, it.say),
    "roofline": _EngineBench.roofline,
    "prefill": lambda it: prefill_figures(it.model, it.products),
    "prefix": lambda it: prefix_figures(it.model),
    "scheduler": lambda it: {
        "scheduler_us_256": host.scheduler_microseconds(),
        "kv_waste": kv_waste(it.options.workload),
    },
    "host": lambda it: host.host_figures(host.ROWS, host.CONTEXTS, it.say),
    "ranks": lambda it: rank_figures(it.folder, it.options.dtype),
    "formats": lambda it: format_figures(it.folder, it.options.model_dir, it.say),
    "steps": lambda it: measured_step_time(it.model, it.options.running, it.options.workload).figures(),
    "simulation": lambda it: simulation_errors(it.model, it.options.running, it.options.workload, it.say),
    "invariance": _EngineBench.invariance,
    "pocket-drafts": lambda _: speculation.pocket_figures(speculation.LOADS),
    "oracle": _EngineBench.oracle_drafts,
    "gaps": lambda it: step_gaps(it.model, it.options.running),
    "peers": _EngineBench.peer_ratios,
}
#: Groups to skip, by device: graphs, overlap and gaps need a GPU; batch-invariant mode and the pocket pair are measured
#: only on CPUs.
_NOT_ON: Mapping[str, Sequence[str]] = {
    "cpu": ("batches", "overlap", "escalation", "gaps"),
    "cuda": ("invariance", "pocket-drafts", "ranks", "formats"),
}
