"""The synchronous engine. `Engine.step` schedules a batch, has the worker execute its plan, and reports the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...text.grammars.compiler import GrammarCompiler, Vocabulary
from ...text.grammars.state import Grammars, GrammarState, Mask
from ...text.tokenizer import Tokenizer
from ..models.loading.loader import Progress
from .config import EngineConfig
from .kv.kv_cache_manager import KVCacheManager
from .kv.sizing import KVCacheSize
from .output.output_processor import OutputProcessor, cut_drafts
from .scheduling.limits import RequestLimits
from .scheduling.scheduler import Scheduler
from .scheduling.step_record import RecordHeader, StepRecorder
from .speculation.cost_table import CostTable
from .speculation.draft_model import DraftModel
from .speculation.drafter import Drafter, NgramDrafter
from .speculation.speculator import Speculator
from .speculation.vocabulary_check import check_same_vocabulary
from .stats import EngineStats
from .step import StepPlan, StepResult, StepSampling
from .types.outputs import StepOutputs
from .types.prediction import PredictionCursor
from .types.request import GenerationRequest
from .types.request_state import RequestState, ScheduledRequest
from .worker.devices import allow_tf32, use_device
from .worker.model_runner import Runner, graph_limits
from .worker.served_model import DraftWeights, ServedModel
from .worker.warm_up import make_ready, step_profile
from .worker.worker import Worker


class Engine:
    """A model that serves many requests, one `step` at a time. Not thread-safe: use `EngineLoop`."""

    def __init__(
        self,
        served: ServedModel,
        config: EngineConfig,
        *,
        draft: DraftWeights | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        """Set up the engine. `drafters` are used in addition to the drafters that `config` enables.

        Raises ConfigurationError if `draft` does not share the model's vocabulary, the device is not available, or
        context and KV cache do not fit (`KVCacheSize.of`).
        """
        use_device(config.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = served.weights
        self._sizes = sizes = KVCacheSize.of([model, draft.weights] if draft is not None else [model], config)
        self.config = config
        self.model_id = served.model_id
        self.context_length = sizes.context_length
        self.sampling = served.sampling
        self._tokenizer = served.tokenizer
        self._vocab_size = model.config.vocab_size
        self._limits = RequestLimits(self._vocab_size, sizes.context_length, sizes.num_blocks, config)
        self._eos_ids = served.eos_ids
        self._grammars = _grammars(served)
        runner = Runner(
            model,
            sizes.num_blocks,
            config.block_size,
            batch_invariant=config.batch_invariant,
            attention_backend=config.attention_backend,
        )
        self._runners = [runner]
        drafts = config.num_speculative_tokens if draft is not None or config.ngram or drafters else 0
        make_ready(runner, graph_limits(sizes.context_length, drafts, config), config.max_num_batched_tokens)
        own: list[Drafter] = [NgramDrafter()] if config.ngram else []
        if draft is not None:
            vocabulary = None if served.tokenizer is None else served.tokenizer.vocabulary()
            check_same_vocabulary(self._vocab_size, draft.weights.config.vocab_size, vocabulary, draft.vocabulary)
            draft_model = DraftModel(draft.weights, model.config, sizes, config)
            own.append(draft_model)
            self._runners.append(draft_model.runner)
        costs = CostTable(step_profile(runner, config)) if config.draft_length == "adaptive" else None
        self._speculator = Speculator([*own, *drafters], config, costs)
        self._worker = Worker(runner, self._speculator.propose)
        self._counters = EngineStats()
        self._recorder: StepRecorder | None = None
        if config.record_steps is not None:
            window = None if sizes.window is None else (sizes.window.num_tokens, sizes.window.max_chunk)
            self._recorder = StepRecorder(Path(config.record_steps), RecordHeader(config, sizes.num_blocks, window))
        self._cache, self._scheduler, self._outputs = self._fresh_schedule()
        # Requests with a reserved place in the queue, and their arrival time, in `time.monotonic` seconds.
        self._expected: dict[str, tuple[GenerationRequest, float]] = {}
        self._batch: Sequence[ScheduledRequest] = ()  # batch of a step that has not ended

    @classmethod
    def from_folder(
        cls, folder: Path, *, draft: Path | None = None, config: EngineConfig, progress: Progress | None = None
    ) -> Engine:
        """Load a model and its tokenizer from a Hugging Face style folder; `draft` may also be a GGUF file.

        The model is named after the folder. Raises ModelLoadError, and the errors of the constructor.
        """
        use_device(config.device)  # fail before loading any weights
        allow_tf32(config.device)
        served = ServedModel.from_folder(folder, config, progress)
        return cls(served, config, draft=DraftWeights.from_path(draft, served.weights) if draft else None)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigurationError("This engine has no tokenizer: it was built from a bare model.")
        return self._tokenizer

    @property
    def has_work(self) -> bool:
        return len(self._outputs) > 0

    @property
    def is_streaming(self) -> bool:
        """Return whether a client streams any of the answers."""
        return self._outputs.are_streamed

    @property
    def reads_prompts(self) -> bool:
        """Return whether the next step may contain prompt tokens, and so take much longer than a decode step."""
        return self._scheduler.reads_prompts

    def expect(self, request: GenerationRequest) -> None:
        """Reserve a place in the queue until the request is added or aborted, while its constraint is being compiled.

        Raises the errors of `add_request`, except the one for an unusable constraint.
        """
        self._check(request)
        self._expected[request.request_id] = request, time.monotonic()

    def prepare(self, request: GenerationRequest) -> GrammarState | None:
        """Compile the request's constraint, if it has one. Raises InvalidRequestError if the constraint cannot be used.

        Another thread may call this before `add_request`, so that compiling delays no step.
        """
        if request.constraint is None:
            return None
        if self._grammars is None:
            raise ConfigurationError("This engine has no tokenizer, so it cannot constrain answers with a grammar.")
        return self._grammars.begin(request.constraint, ignore_eos=request.params.ignore_eos)

    def add_request(self, request: GenerationRequest, grammar: GrammarState | None = None) -> None:
        """Queue a request. `grammar` is the result of `prepare`; if None, the constraint is compiled here.

        Raises InvalidRequestError (empty prompt, unknown token ids, id in use, unusable constraint), ContextLengthError
        (prompt and output do not fit context or KV cache; nothing is truncated) or OverloadedError (queue full).
        """
        expected = self._expected.pop(request.request_id, None)
        if expected is None:
            self._check(request)
        arrived = time.monotonic() if expected is None else expected[1]
        grammar = self.prepare(request) if grammar is None else grammar
        resumed = request.resumed
        indices = range(request.n) if resumed is None else resumed.token_ids
        states = [self._answer(request, index, grammar, arrived) for index in indices]
        if resumed is not None:
            for state in states:
                state.resume(resumed.token_ids[state.index], resumed.cached_tokens)
        if self._recorder is not None:
            self._recorder.add(states)
        self._outputs.begin(states)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request and free its blocks; do nothing if the id is unknown or the request has finished.

        With an `index`, drop only that answer; the request's other answers continue.
        """
        expected = self._expected.pop(request_id, None) is not None
        if self._recorder is not None:
            self._recorder.remove(request_id, index, self._outputs.states(request_id))
        self._counters.aborted_requests += self._outputs.drop(request_id, index) or expected

    def step(self) -> StepOutputs:
        """Run one step over the scheduled requests and return the new tokens; empty if nothing is scheduled."""
        started = time.perf_counter()
        batch = self._batch = self._scheduler.schedule()
        if not batch:
            return StepOutputs()
        if self._recorder is not None:
            self._recorder.begin(batch)
        result = self._execute(batch)
        outputs = self._outputs.process(batch, result)
        step_s = time.perf_counter() - started
        self._speculator.observe(batch, step_s)
        if self._recorder is not None:
            self._recorder.end(batch, result, self._speculator.draft_tokens, step_s)
        self._scheduler.observe(len(batch), step_s)
        self._counters.step_seconds.observe(step_s)
        self._batch = ()
        return outputs

    def _execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        """Execute a step in the worker. If the device is asynchronous, also launch the next step if it is known."""
        cut_drafts(batch)
        plan, worker = self._scheduler.plan(batch), self._worker
        sampling = self._draft(plan, batch[plan.num_decodes :])
        worker.launch(plan, sampling)
        ahead = self._scheduler.plan_ahead(batch) if worker.runner.runs_ahead else None
        if ahead is not None:
            worker.launch_ahead(ahead)
        if self._recorder is not None:
            self._recorder.plan(plan, ahead)
        return worker.read(plan)

    def _draft(self, plan: StepPlan, batch: Sequence[ScheduledRequest]) -> StepSampling:
        """Run the drafters of a step, and cut the drafts in `batch` at the first token that a grammar forbids."""
        grammars = {item.state.slot: item.state.grammar for item in batch if item.state.grammar is not None}

        def mask_after(slot: int, draft_ids: Sequence[int]) -> Mask | None:
            return grammars[slot].mask(draft_ids)

        drafts = self._worker.draft(plan, mask_after)
        for item in batch if drafts else ():
            if (draft := drafts.get(item.state.slot)) is not None:
                item.draft_ids, item.draft_ends = list(draft.token_ids), draft.ends
        cut_drafts(batch)
        masks = {item.state.slot: _masks(item) for item in batch if item.state.grammar is not None and item.num_samples}
        return StepSampling(plan.id, masks)

    def reset(self) -> list[str]:
        """Drop all requests and the KV cache, and return the ids of the dropped requests.

        Call this after a failed step: in-flight state is unreliable, so requests must be added again with their tokens
        so far (`Resumption`). Expected requests keep their places.
        """
        batch = [item.state.request_id for item in self._batch]  # has requests that ended in the failed step
        lost = list(dict.fromkeys([*self._outputs.request_ids(), *batch]))
        self._batch = ()
        self._worker.reset()
        if self._recorder is not None:
            self._recorder.reset()
        self._cache, self._scheduler, self._outputs = self._fresh_schedule()
        self._counters.preemptions += len(lost)
        return lost

    def sleep(self) -> None:
        """Free the KV cache, and move weights on a GPU to host memory, until `wake`. Drops all requests."""
        self.reset()
        for runner in self._runners:
            runner.release()

    def wake(self) -> None:
        for runner in self._runners:
            runner.restore()

    @property
    def suspects(self) -> list[str]:
        """The requests of the failed step, or all requests if the step failed before its batch was known."""
        return list({item.state.request_id: None for item in self._batch}) or self._outputs.request_ids()

    def stats(self) -> EngineStats:
        running = self._scheduler.running
        pool = self._cache.pool
        return replace(
            self._counters,
            running=len(running),
            waiting=len(self._scheduler.waiting) + len(self._expected),
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            kv_slots_allocated=pool.num_used * self.config.block_size,
            kv_slots_wasted=self._cache.num_wasted_slots(running),
            queue_seconds=self._counters.queue_seconds.copy(),
            step_seconds=self._counters.step_seconds.copy(),
            **self._speculator.counters(),
        )

    def _fresh_schedule(self) -> tuple[KVCacheManager, Scheduler, OutputProcessor]:
        config, sizes = self.config, self._sizes
        cache = KVCacheManager(
            sizes.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching, window=sizes.window
        )
        scheduler = Scheduler(config, cache, self._speculator, self._counters)
        return cache, scheduler, OutputProcessor(scheduler, cache, self._speculator)

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._outputs or request.request_id in self._expected:
            raise InvalidRequestError(f"Request id {request.request_id!r} is in use.", param="request_id")
        self._limits.check(request, self._scheduler)
        if request.resumed is None:
            self._scheduler.check_capacity([expected for expected, _ in self._expected.values()])

    def _answer(
        self, request: GenerationRequest, index: int, grammar: GrammarState | None, arrived: float
    ) -> RequestState:
        """Return the initial state of answer number `index`. Answers have consecutive seeds."""
        return RequestState(
            request=request,
            max_tokens=self._max_tokens(request),
            params=request.params.resolved(self.sampling),
            seed=request.seed + index,
            end_ids=request.params.end_ids(self._eos_ids),
            token_ids=list(request.prompt_ids),
            prediction=PredictionCursor(request.draft_ids[: self.context_length]),  # no answer exceeds the context
            index=index,
            grammar=grammar if grammar is None or index == 0 else grammar.fork(),
            arrived=arrived,
        )

    def _max_tokens(self, request: GenerationRequest) -> int:
        """Return an answer's token limit: the request's, else the server's default, cut to the remaining context."""
        if request.embed:
            return 0
        remaining = self._scheduler.longest(self.context_length) - len(request.prompt_ids)
        return request.params.max_tokens or min(remaining, self.config.default_max_tokens)


def _masks(item: ScheduledRequest) -> list[bytes | None]:
    """Return the grammar masks of an item's sampled rows."""
    grammar = item.state.grammar
    assert grammar is not None, "only constrained rows have masks"
    masks = [grammar.mask(item.draft_ids[:number]) for number in range(item.num_samples)]
    return [None if mask is None else mask.tobytes() for mask in masks]


def _grammars(served: ServedModel) -> Grammars | None:
    tokenizer = served.tokenizer
    if tokenizer is None:
        return None
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, served.eos_ids), tokenizer.encode)
    return Grammars(compiler, served.weights.config.vocab_size, served.eos_ids, num_tokens=tokenizer.vocab_size)
