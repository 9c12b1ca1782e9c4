"""The synchronous engine. `Engine.step` schedules a batch, has the worker execute its plan, and reports the result.

An asynchronous device (`Runner.runs_ahead`) gets the forward pass of the next step before the result of the current one
is read, so that it computes while the host processes this result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...kernels.attention.block_tables import BlockTables
from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...text.grammars.state import GrammarState, Mask
from ...text.tokenizer import Tokenizer
from ..models.loading.loader import Progress
from ..models.sharding import ALONE
from .config import EngineConfig
from .kv.kv_cache_manager import KVCacheManager
from .kv.sizing import KVCacheSize
from .output.output_processor import OutputProcessor, cut_drafts
from .ranks.group import of_rank
from .ranks.leader import Leader
from .scheduling.limits import RequestLimits
from .scheduling.scheduler import Scheduler
from .scheduling.step_record import RecordHeader, StepRecorder
from .speculation.cost_table import CostTable, fixed_rows
from .speculation.draft_model import DraftModel, check_same_vocabulary
from .speculation.drafter import Drafter, NgramDrafter
from .speculation.speculator import Speculator, StepDrafts
from .stats import EngineStats
from .step import StepPlan, StepResult, StepSampling
from .types.outputs import StepOutputs
from .types.prediction import PredictionCursor
from .types.request import GenerationRequest
from .types.request_state import RequestState, ScheduledRequest
from .worker.devices import allow_tf32, use_device
from .worker.memory_profile import gpu_cache_bytes
from .worker.model_runner import Runner, graph_limits
from .worker.served_model import DraftWeights, ServedModel
from .worker.slots import Slots
from .worker.warm_up import make_ready, step_profile
from .worker.worker import Worker


@dataclass(slots=True)
class _UnreadStep:
    """A launched step whose result is unread."""

    batch: Sequence[ScheduledRequest]
    plan: StepPlan
    # Constrained requests, with their slots in the plan.
    constrained: list[tuple[int, ScheduledRequest]]
    prompt_tokens: int
    drafts: StepDrafts
    # Requests that have ended or were preempted since the plan, but not by this step's result.
    dropped: Set[RequestState]

    @property
    def request_ids(self) -> list[str]:
        """The requests whose tokens this step computes."""
        return [item.state.request_id for item in self.batch if item.state not in self.dropped]


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
        models = [model, draft.weights] if draft is not None else [model]
        self._sizes = sizes = KVCacheSize.of(models, config, gpu_cache_bytes(models, config))
        self.config = config
        self.model_id = served.model_id
        self.context_length = sizes.context_length
        self.sampling = served.sampling
        self._tokenizer = served.tokenizer
        self._vocab_size = model.config.vocab_size
        self._limits = RequestLimits(self._vocab_size, sizes.context_length, sizes.num_blocks, config)
        self._eos_ids = served.eos_ids
        self._grammars = served.grammars()
        tables = BlockTables(config.max_num_seqs, -(-sizes.context_length // config.block_size))
        runner = Runner(
            model,
            sizes.num_blocks,
            config.block_size,
            tables=tables,
            batch_invariant=config.batch_invariant,
            cache=config.cache,
        )
        self._runners = [runner]
        make_ready(runner, graph_limits(config), config.max_num_batched_tokens)
        own: list[Drafter] = [NgramDrafter()] if config.ngram else []
        if draft is not None:
            vocabulary = None if served.tokenizer is None else served.tokenizer.vocabulary()
            check_same_vocabulary(self._vocab_size, draft.weights.config.vocab_size, vocabulary, draft.vocabulary)
            draft_model = DraftModel(draft.weights, model.config, sizes, config, tables)
            own.append(draft_model)
            self._runners.append(draft_model.runner)
        profile = step_profile(runner, config) if config.draft_length == "adaptive" else {}
        self._fixed_rows = fixed_rows(profile) if profile else 0.0
        self._speculator = Speculator([*own, *drafters], config, CostTable(profile) if profile else None)
        new_slots = partial(Slots, tables, config.block_size)
        self._worker = Worker(runner, self._speculator.propose, new_slots, model.group)
        self._counters = EngineStats()
        self._recorder: StepRecorder | None = None
        if config.record_steps is not None:
            window = None if sizes.window is None else (sizes.window.num_tokens, sizes.window.max_chunk)
            header = RecordHeader(config, sizes.num_blocks, window, self._fixed_rows)
            self._recorder = StepRecorder(Path(config.record_steps), header)
        self._cache, self._scheduler, self._outputs = self._fresh_schedule()
        # Requests with a reserved place in the queue, and their arrival time, in `time.monotonic` seconds.
        self._expected: dict[str, tuple[GenerationRequest, float]] = {}
        self._unread: deque[_UnreadStep] = deque()  # launched steps; between steps, at most one that is not sampled

    @classmethod
    def from_folder(
        cls, folder: Path, *, draft: Path | None = None, config: EngineConfig, progress: Progress | None = None
    ) -> Engine:
        """Load a model and its tokenizer from a Hugging Face style folder; `draft` may also be a GGUF file.

        The model is named after the folder. Raises ModelLoadError, and the errors of the constructor.
        """
        use_device(config.device)  # fail before loading any weights
        group = ALONE
        if config.num_ranks > 1:
            group = Leader(folder, config)
            config = of_rank(config, 0)
        allow_tf32(config.device)
        load = partial(ServedModel.from_folder, folder, config, progress, group)
        served = group.begin(load) if isinstance(group, Leader) else load()
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
    def survives_failures(self) -> bool:
        """Return whether `reset` suffices after a failed step. Several ranks may be at different places in it."""
        return self._worker.group.is_alone

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
        if not self._unread and not self._launch():
            return StepOutputs()  # every request waits for its constraint to be compiled, or has been aborted
        step = self._unread[0]
        self._sample(step)
        if self._runs_ahead and not self._speculator.awaits_tokens(len(self._scheduler.running)):
            self._counters.overlapped_steps += self._launch()
        outputs, result = self._read(step)
        step_s = time.perf_counter() - started
        self._speculator.observe(step.batch, step_s, step.drafts)
        if self._recorder is not None:
            self._recorder.end(step.batch, result, step.drafts.draft_tokens, step_s)
        self._scheduler.observe(len(step.batch), step_s, (step.prompt_tokens, step.drafts.draft_tokens))
        self._counters.step_seconds.observe(step_s)
        self._unread.popleft()
        return outputs

    @property
    def _runs_ahead(self) -> bool:
        """Stages before the last learn a step's tokens from its result, so they cannot run ahead."""
        return self._worker.runner.runs_ahead and self._worker.group.num_stages == 1

    def _launch(self) -> bool:
        """Schedule a step, and launch its forward pass. Return False if nothing is scheduled."""
        batch = self._scheduler.schedule()
        if batch:
            self._execute(batch)
        elif self._recorder is not None and self._unread:
            self._recorder.pause()
        return bool(batch)

    def _execute(self, batch: Sequence[ScheduledRequest]) -> None:
        """Plan a step, run its drafters and launch its forward pass."""
        if self._recorder is not None:
            self._recorder.begin(batch)
        # The grammar of a request with an unread result lacks tokens, so its drafts are only cut by `_sample`.
        other_items = batch[self._scheduler.num_decodes :]
        cut_drafts([item for item in other_items if not item.state.num_pending_tokens])
        constrained = [item for item in other_items if item.state.grammar is not None and item.num_samples]
        plan = self._scheduler.plan(batch)
        if self._recorder is not None:
            self._recorder.plan(plan)
        prompt_tokens, dropped = self._scheduler.prompt_tokens, self._scheduler.decodes.dropped
        in_slots = [(item.state.slot, item) for item in constrained]
        self._unread.append(_UnreadStep(batch, plan, in_slots, prompt_tokens, self._speculator.step, dropped))
        grammars = {slot: item.state.grammar for slot, item in in_slots}

        def mask_after(slot: int, draft_ids: Sequence[int]) -> Mask | None:
            grammar = grammars[slot]
            assert grammar is not None, "only constrained rows have masks"
            return grammar.mask(draft_ids)

        drafts = self._worker.launch(plan, mask_after)
        for item in other_items if drafts else ():
            if (draft := drafts.get(item.state.slot)) is not None:
                item.draft_ids, item.draft_ends = list(draft.token_ids), draft.ends
                item.state.unread_drafts = item.draft_ids
                item.state.num_computed_tokens -= item.num_planned_drafts - len(draft.token_ids)
                item.num_planned_drafts = len(draft.token_ids)

    def _sample(self, step: _UnreadStep) -> None:
        """Sample the tokens of a step, under the masks of grammars that know all earlier tokens."""
        masks: dict[int, list[bytes | None]] = {}
        dropped: list[int] = []
        for slot, item in step.constrained:
            if item.state in step.dropped:
                dropped.append(slot)
            else:
                cut_drafts([item])
                masks[slot] = _masks(item)
        self._worker.sample(StepSampling(step.plan.id, masks, dropped))

    def _read(self, step: _UnreadStep) -> tuple[StepOutputs, StepResult]:
        result = self._worker.read(step.plan)
        if self._recorder is not None:
            self._recorder.read(step.batch)
        return self._outputs.process(step.batch, result), result

    def reset(self) -> list[str]:
        """Drop all requests and the KV cache, and return the ids of the dropped requests.

        Call this after a failed step: in-flight state is unreliable, so requests must be added again with their tokens
        so far (`Resumption`). Expected requests keep their places.
        """
        lost = list(dict.fromkeys([*self._outputs.request_ids(), *self.suspects]))  # some ended in the failed step
        self._unread.clear()
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
        """The requests of the failed steps, or all requests if the first failed before its batch was known."""
        in_steps = [name for step in self._unread for name in step.request_ids]
        return list(dict.fromkeys(in_steps)) or self._outputs.request_ids()

    def stats(self) -> EngineStats:
        running, pool = self._scheduler.running, self._cache.pool
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
        scheduler = Scheduler(config, cache, self._speculator, self._counters, self._fixed_rows)
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
    """Return the grammar masks of a row for the last known token and of a row for each draft token."""
    grammar = item.state.grammar
    assert grammar is not None, "only constrained rows have masks"
    masks = [grammar.mask(item.draft_ids[:number]) for number in range(1 + len(item.draft_ids))]
    return [None if mask is None else mask.tobytes() for mask in masks]
