"""The synchronous engine. `Engine.step` tells the whole story: schedule, draft, run, sample, advance."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.sampling import logit_edits
from ...protocol.structured import Constraint
from ...text.grammar import GrammarCompiler, Vocabulary
from ...text.grammar_state import Grammars, GrammarState
from ...text.tokenizer import Tokenizer
from ..models.loader import Progress
from .beam_search import BeamSearch
from .config import EngineConfig
from .draft_model import DraftModel
from .drafter import Drafter
from .kv_cache import KVCacheManager
from .limits import Limits
from .ngram import NgramDrafter
from .pooling import MeanPool
from .prediction import PredictionCursor
from .prompt_scores import score_prompts
from .request import FinishReason, GenerationRequest, RequestState, TokenLogprob, TokenOutput
from .runner import Chunk, Runner, graph_limits
from .sampler import SamplingRow, log_probabilities, sample
from .scheduled_request import ScheduledRequest
from .scheduler import Scheduler
from .served_model import DraftWeights, ServedModel
from .sizing import Sizes
from .speculation import Speculator
from .stats import EngineStats
from .step_outputs import StepOutputs
from .vocabulary import check_same_vocabulary


class Engine:
    """One model serving many requests, `step` by `step`. Not thread-safe: see `AsyncEngine`."""

    def __init__(
        self,
        served: ServedModel,
        config: EngineConfig,
        *,
        draft: DraftWeights | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        """`drafters`: further ones, beside those of the configuration.

        Raises ConfigurationError if `draft` does not share the model's vocabulary, and what `Sizes.of` raises.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model = served.weights
        self._sizes = sizes = Sizes.of([model, draft.weights] if draft is not None else [model], config)
        self.config = config
        self.model_id = served.model_id
        self.context_length = sizes.context_length
        self.default_temperature = served.default_temperature
        self._tokenizer = served.tokenizer
        self._vocab_size = model.config.vocab_size
        self._limits = Limits(self._vocab_size, sizes.context_length, served.eos_ids, sizes.num_blocks, config)
        self._eos_ids = served.eos_ids
        self._grammars = _grammars(served)
        self._runner = Runner(
            model,
            sizes.num_blocks,
            config.block_size,
            batch_invariant=config.batch_invariant,
            attention_backend=config.attention_backend,
        )
        if config.cuda_graphs:
            drafts = config.num_draft_tokens if draft is not None or config.ngram or drafters else 0
            self._runner.capture(graph_limits(sizes.context_length, drafts, config))
        own: list[Drafter] = [NgramDrafter()] if config.ngram else []
        if draft is not None:
            own.append(self._draft_model(served, draft))
        self._speculator = Speculator([*own, *drafters], config)
        self._counters = EngineStats()
        self._cache, self._scheduler = self._fresh_schedule()
        self._requests: dict[str, list[RequestState]] = {}  # the answers of each that are not finished
        self._searches: dict[str, BeamSearch] = {}
        # Those that have a place in the queue but are not there yet, and when they arrived.
        self._expected: dict[str, tuple[GenerationRequest, float]] = {}
        self._seeds = random.Random(config.seed)

    @classmethod
    def from_folder(
        cls, folder: Path, *, draft: Path | None = None, config: EngineConfig, progress: Progress | None = None
    ) -> Engine:
        """Load target and tokenizer from a Hugging Face style folder, and the draft from one or from a GGUF file.

        The model is called what the folder is called. Raises ModelLoadError.
        """
        served = ServedModel.from_folder(folder, config, progress)
        return cls(served, config, draft=DraftWeights.from_path(draft, config) if draft else None)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigurationError("This engine was built from a bare model, without a tokenizer.")
        return self._tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def expect(self, request: GenerationRequest) -> None:
        """Keep a place in the queue for a request that is being prepared, until it is added or aborted.

        Raises what `add_request` raises, but for an unusable constraint.
        """
        self._check(request)
        self._expected[request.request_id] = request, time.monotonic()

    def prepare(self, request: GenerationRequest) -> GrammarState | None:
        """Compile the request's constraint, if it has one; raises InvalidRequestError if it cannot be used.

        May be called from another thread, ahead of `add_request`, so that no step waits for it.
        """
        return None if request.constraint is None else self._grammar(request, request.constraint)

    def add_request(self, request: GenerationRequest, grammar: GrammarState | None = None) -> None:
        """Queue a request, with what `prepare` made of its constraint: that is done here if it was not.

        Raises InvalidRequestError (empty prompt, unknown token ids, id in use, unusable constraint), ContextLengthError
        (prompt and output do not fit context or KV cache; nothing is truncated) or OverloadedError (queue full).
        """
        expected = self._expected.pop(request.request_id, None)
        if expected is None:
            self._check(request)
        params = request.params
        state = RequestState(
            request=request,
            max_tokens=self._max_tokens(request),
            temperature=self.default_temperature if params.temperature is None else params.temperature,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            unforked=request.num_branches - 1,
            end_ids=params.end_ids(self._eos_ids),
            token_ids=list(request.prompt_ids),
            prediction=PredictionCursor(request.draft_ids[: self.context_length]),  # the answer is no longer than that
            grammar=self.prepare(request) if grammar is None else grammar,
            pool=MeanPool() if request.embed else None,
            arrived=time.monotonic() if expected is None else expected[1],
        )
        self._scheduler.add(state)
        self._requests[request.request_id] = [state]
        if request.beam is not None:
            self._searches[request.request_id] = BeamSearch(state, request.beam, self._scheduler, self._cache)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request and free its blocks; one that is not here (any more) is no error.

        With an `index` only this one of its answers, while others go on.
        """
        others = [state for state in self._requests.get(request_id, ()) if state.index != index]
        if index is not None and others:
            for state in self._requests[request_id]:
                if state.index == index:
                    self._remove(state)
            self._requests[request_id] = others
            return
        expected = self._expected.pop(request_id, None) is not None
        self._searches.pop(request_id, None)
        states = self._requests.pop(request_id, [])
        for state in states:
            self._remove(state)
        self._counters.aborted_requests += expected or bool(states)

    def step(self) -> StepOutputs:
        """Move every scheduled request on by one step and return the tokens that came out."""
        started = time.perf_counter()
        batch = self._scheduler.schedule()
        logits, tokens = self._compute(batch)
        outputs = self._advance(batch, logits, tokens)
        step_s = time.perf_counter() - started
        self._speculator.observe(batch, step_s)
        self._counters.step_seconds.observe(step_s)
        return outputs

    def _compute(self, batch: list[ScheduledRequest]) -> tuple[Tensor, list[int]]:
        """All that tensors are needed for: draft, run, sample. Logits (samples, vocab) and a token for each row."""
        self._copy_blocks(self._cache.take_copies())
        self._speculator.propose([item for item in batch if item.state.pool is None], self._sampling_row)
        _cut_drafts(batch)
        logits = score_prompts(batch, self._runner.run([_chunk(item) for item in batch]))
        return logits, sample(logits, self._sampling_rows(batch))

    def reset(self) -> list[str]:
        """Forget all requests and all that is cached, and return the ids of these requests.

        For after a failure in the middle of a step, when nothing of what was in flight can be trusted. Requests that
        are expected may still come.
        """
        lost = list(self._requests)
        self._requests.clear()
        self._searches.clear()
        self._cache, self._scheduler = self._fresh_schedule()
        self._counters.aborted_requests += len(lost)
        return lost

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

    def _draft_model(self, served: ServedModel, draft: DraftWeights) -> DraftModel:
        weights, target = draft.weights, served.weights.config
        vocabulary = None if served.tokenizer is None else served.tokenizer.vocabulary()
        check_same_vocabulary(target.vocab_size, weights.config.vocab_size, vocabulary, draft.vocabulary)
        return DraftModel(weights, target, self._sizes, self.config)

    def _fresh_schedule(self) -> tuple[KVCacheManager, Scheduler]:
        config, sizes = self.config, self._sizes
        cache = KVCacheManager(
            sizes.num_blocks, config.block_size, prefix_caching=config.prefix_caching, window=sizes.window
        )
        return cache, Scheduler(config, cache, self._speculator, self._counters)

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._requests or request.request_id in self._expected:
            raise InvalidRequestError(f"Request id {request.request_id!r} is in use.", param="request_id")
        self._limits.check(request, self._scheduler)
        self._scheduler.check_room([expected for expected, _ in self._expected.values()])

    def _max_tokens(self, request: GenerationRequest) -> int:
        """Of one answer: as many as there is room for, where the request does not say."""
        if request.embed:
            return 0
        return request.params.max_tokens or self._limits.longest(request, self._scheduler) - len(request.prompt_ids)

    def _grammar(self, request: GenerationRequest, constraint: Constraint) -> GrammarState:
        if self._grammars is None:
            raise ConfigurationError("This engine was built from a bare model: without a tokenizer it has no grammars.")
        return self._grammars.begin(constraint, ignore_eos=request.params.ignore_eos)

    def _sampling_rows(self, batch: list[ScheduledRequest]) -> list[SamplingRow]:
        rows: list[SamplingRow] = []
        for item in batch:
            if item.state.decode is item:
                rows.append(self._sampling_row(item, 0))
            else:
                rows += [self._sampling_row(item, index) for index in range(item.num_samples)]
        return rows

    def _sampling_row(self, item: ScheduledRequest, index: int) -> SamplingRow:
        """How to sample the `index`-th new token of a scheduled request, after as many of its drafts."""
        state, request = item.state, item.state.request
        edits = mask = None
        if state.edits:
            answer = state.token_ids[len(request.prompt_ids) :] + item.draft_ids[:index]
            edits = logit_edits(request.params, request.prompt_ids, answer, state.end_ids)
        if state.grammar is not None:
            mask = state.grammar.mask(item.draft_ids[:index])
        return SamplingRow(state.temperature, state.seed, len(state.token_ids) + index, request.params, edits, mask)

    def _advance(self, batch: list[ScheduledRequest], logits: Tensor, tokens: list[int]) -> StepOutputs:
        decoded, others = self._scheduler.decodes.take(batch, tokens)
        self._counters.steps += 1
        self._counters.generated_tokens += len(decoded.token_ids)
        outputs: list[TokenOutput] = []
        beams: dict[str, list[tuple[ScheduledRequest, Tensor]]] = {}
        for item, row in others:
            rows = slice(row, row + item.num_samples)
            if item.state.request.beam:
                beams.setdefault(item.state.request_id, []).append((item, logits[rows]))
            elif item.num_samples:
                branches = self._branch_off(item, logits[rows]) if item.state.unforked else []
                outputs += [self._accept(item, tokens[rows], logits[rows]), *branches]
            else:
                outputs += self._catch_up(item)
        for request_id, items in beams.items():
            outputs += self._advance_beams(request_id, items)
        return StepOutputs(decoded, outputs)

    def _advance_beams(self, request_id: str, items: list[tuple[ScheduledRequest, Tensor]]) -> list[TokenOutput]:
        """All answers of a beam search come out together, when it is over."""
        search = self._searches[request_id]
        best = search.advance(items)
        states = self._requests[request_id] = search.states
        if not best:
            return []
        outputs: list[TokenOutput] = []
        for index, answer in enumerate(best[: states[0].request.n]):
            stats = replace(states[0].stats(), completion_tokens=len(answer.token_ids))
            self._counters.generated_tokens += len(answer.token_ids)
            scores = tuple(states[0].prompt_logprobs) if index == 0 else ()
            outputs.append(
                TokenOutput(
                    request_id,
                    answer.token_ids,
                    tuple(answer.logprobs),
                    answer.finish_reason,
                    stats,
                    index,
                    scores,
                    cached_tokens=stats.cached_tokens,
                )
            )
        for state in states:
            self._remove(state)
        del self._requests[request_id], self._searches[request_id]
        self._counters.finished_requests += 1
        return outputs

    def _catch_up(self, item: ScheduledRequest) -> list[TokenOutput]:
        """A step that samples nothing has no output, unless it is the last one of an embedding."""
        state, is_done = item.state, item.is_caught_up
        state.num_computed_tokens += item.num_tokens
        self._cache.register(state)
        if state.pool is None or not is_done:
            return []
        stats = state.stats()
        self._finish(state)
        return [
            TokenOutput(state.request_id, [], finish_reason="stop", stats=stats, embedding=tuple(state.pool.vector()))
        ]

    def _branch_off(self, item: ScheduledRequest, logits: Tensor) -> list[TokenOutput]:
        """The other answers of a request begin where its prompt has just been computed, each with its own seed."""
        parent = item.state
        outputs: list[TokenOutput] = []
        for index in range(1, parent.unforked + 1):
            child = replace(
                parent,
                index=index,
                unforked=0,
                seed=parent.seed + index,
                token_ids=list(parent.token_ids),
                prediction=PredictionCursor(parent.request.draft_ids[: self.context_length]),
                grammar=parent.grammar and parent.grammar.fork(),
                num_computed_tokens=item.start + item.num_tokens,
            )
            child.num_draft_computed_tokens = min(child.num_draft_computed_tokens, child.num_computed_tokens)
            self._scheduler.fork(parent, child)
            self._requests[parent.request_id].append(child)
            first = msgspec.structs.replace(item, state=child, draft_ids=[], drafter=None, num_drafts=0)
            outputs.append(self._accept(first, sample(logits[:1], [self._sampling_row(first, 0)]), logits[:1]))
        return outputs

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            self._runner.copy_blocks(copies)
            self._speculator.copy_blocks(copies)

    def _accept(self, item: ScheduledRequest, sampled: list[int], logits: Tensor) -> TokenOutput:
        """Take over what the target confirmed of the draft, and the one token after it that is the target's own."""
        state = item.state
        is_first = state.num_generated_tokens == 0 and state.index == 0
        num_accepted = _agreement(item.draft_ids, sampled)
        new, finish_reason = self._until_end(sampled[: num_accepted + 1], state)
        if state.grammar is not None:
            new = new[: state.grammar.advance(new)]
            finish_reason = "error" if state.grammar.error else "stop" if state.grammar.complete else finish_reason
        num_accepted = min(num_accepted, len(new))
        self._speculator.record(item, num_accepted)
        state.first_token_at = state.first_token_at or time.monotonic()
        state.num_computed_tokens = len(state.token_ids) + num_accepted
        state.num_draft_computed_tokens = min(state.num_draft_computed_tokens, state.num_computed_tokens)
        state.token_ids.extend(new)
        state.prediction.advance(state.token_ids, len(new), len(item.draft_ids))
        self._speculator.follow(state.prediction)
        logprobs: tuple[TokenLogprob, ...] = ()
        if state.request.params.logprobs is not None and new:
            logprobs = tuple(log_probabilities(logits[: len(new)], new, state.request.params.logprobs))
        self._counters.generated_tokens += len(new)
        stats = state.stats() if finish_reason else None
        scores = tuple(state.prompt_logprobs) if is_first else ()
        error = state.grammar.error if state.grammar is not None else None
        cached = state.num_cached_tokens
        output = TokenOutput(state.request_id, new, logprobs, finish_reason, stats, state.index, scores, error, cached)
        if stats is not None:
            self._finish(state)
        else:
            self._cache.register(state)
            self._cache.trim(state)
            self._scheduler.decodes.join(state)
        return output

    def _until_end(self, tokens: list[int], state: RequestState) -> tuple[list[int], FinishReason | None]:
        """`tokens` up to the end of the answer, if it ends in them."""
        tokens = tokens[: state.num_remaining_tokens]
        for index, token in enumerate(tokens):
            if token in state.end_ids:
                return tokens[:index], "stop"
        return tokens, "length" if len(tokens) == state.num_remaining_tokens else None

    def _finish(self, state: RequestState) -> None:
        self._remove(state)
        self._requests[state.request_id].remove(state)
        if not self._requests[state.request_id]:
            del self._requests[state.request_id]
            self._counters.finished_requests += 1

    def _remove(self, state: RequestState) -> None:
        """An answer leaves, at its end or given up: what became of its prediction, if it has begun, is known now."""
        self._scheduler.remove(state)
        if state.first_token_at is not None:
            accepted = state.prediction.num_accepted
            self._counters.accepted_prediction_tokens += accepted
            self._counters.rejected_prediction_tokens += len(state.request.draft_ids) - accepted


def _chunk(item: ScheduledRequest) -> Chunk:
    state = item.state
    if state.decode is item:
        return Chunk(state.token_ids[-1:], state.num_computed_tokens, state.block_table, 1)
    known = state.token_ids[item.start : item.start + item.num_tokens]
    num_logits = item.num_prompt_scores + item.num_samples
    return Chunk(known + item.draft_ids, item.start, state.block_table, num_logits, state.pool)


def _grammars(served: ServedModel) -> Grammars | None:
    tokenizer = served.tokenizer
    if tokenizer is None:
        return None
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, served.eos_ids), tokenizer.encode)
    return Grammars(compiler, served.weights.config.vocab_size, served.eos_ids, num_tokens=tokenizer.vocab_size)


def _cut_drafts(batch: list[ScheduledRequest]) -> None:
    """Verify no more of a draft than its request's grammar allows."""
    for item in batch:
        if item.draft_ids and item.state.grammar is not None:
            del item.draft_ids[item.state.grammar.num_allowed(item.draft_ids) :]


def _agreement(draft_ids: list[int], sampled: list[int]) -> int:
    """How many draft tokens the target confirmed: the length of the common prefix."""
    for index, token in enumerate(draft_ids):
        if token != sampled[index]:
            return index
    return len(draft_ids)
