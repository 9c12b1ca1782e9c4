"""Beam search: keeps the most probable continuations of a request's beams, as forks that share KV blocks.

Matches transformers' `generate(num_beams=width, do_sample=False, early_stopping=False)`. A beam is ranked by the sum
of its tokens' log-probabilities, a finished beam by that sum / length ** length_penalty, where the length counts the
generated tokens and the end token. The `width` best finished beams are kept. The search is over when the best beam, at
its current length, scores no better than the worst finished one.
"""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..execution.sampler import log_probabilities
from ..kv.kv_cache_manager import KVCacheManager
from ..scheduling.scheduler import Scheduler
from ..types.outputs import FinishReason, TokenLogprob
from ..types.request import BeamParams
from ..types.request_state import RequestState, ScheduledRequest


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer without its end token. Answers are ranked by `score`."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason
    score: float


@dataclass(slots=True)
class _Beam:
    """An unfinished answer; `total` is the log-probability of its generated tokens, in nats."""

    state: RequestState
    total: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    @property
    def generated(self) -> list[int]:
        return self.state.token_ids[self.state.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible next token of a beam, from logits row `row`. `total`: log-probability of the beam and this token."""

    beam: _Beam
    row: int
    token: int
    total: float


class BeamSearch:
    """The beams of one request. Continuations are chosen once every beam has computed all its known tokens."""

    def __init__(self, root: RequestState, params: BeamParams, scheduler: Scheduler, cache: KVCacheManager) -> None:
        self._params = params
        self._scheduler = scheduler
        self._cache = cache
        self._beams = [_Beam(root)]
        self._finished: list[Hypothesis] = []  # the best `width`, best first

    @property
    def states(self) -> list[RequestState]:
        return [beam.state for beam in self._beams]

    def advance(self, items: Sequence[tuple[ScheduledRequest, Tensor]]) -> list[Hypothesis]:
        """Apply a step's logits to the beams: (1, vocab) each, or (0, vocab) for beams with uncomputed tokens left.

        Returns an empty list until the search is over, then the answers, best first; the caller then removes `states`.
        """
        rows = {item.state: logits for item, logits in items if item.is_caught_up}
        choosing = len(rows) == len(self._beams)
        for item, _ in items:
            # A beam that waits for others computes its last token again later, because these logits are not kept.
            waits = item.is_caught_up and not choosing
            self._settle(item.state, item.start + item.num_tokens - waits)
        if not choosing:
            return []
        logits = torch.cat([rows[beam.state] for beam in self._beams])
        candidates = self._choose(logits)
        is_full = len(self._finished) == self._params.width
        if not candidates or (is_full and self._score(candidates[0]) <= self._finished[-1].score):
            return self._finished
        self._continue(candidates, logits)
        return []

    def _settle(self, state: RequestState, num_computed_tokens: int) -> None:
        state.num_computed_tokens = num_computed_tokens
        state.num_draft_computed_tokens = min(state.num_draft_computed_tokens, num_computed_tokens)
        self._cache.register(state)

    def _choose(self, logits: Tensor) -> list[_Candidate]:
        """Return the candidates to continue, best first. Store ended candidates that rank among the first `width`."""
        width = self._params.width
        candidates: list[_Candidate] = []
        for rank, candidate in enumerate(self._candidates(logits)):
            state = candidate.beam.state
            ends = candidate.token in state.end_ids
            if not ends and state.num_remaining_tokens > 1:
                candidates.append(candidate)
            elif rank < width:
                self._finished.append(self._hypothesis(candidate, logits, "stop" if ends else "length"))
        self._finished = sorted(self._finished, key=lambda hypothesis: -hypothesis.score)[:width]
        return candidates[:width]

    def _candidates(self, logits: Tensor) -> list[_Candidate]:
        """Return the best continuations of all beams, best first, including at least `width` that do not end."""
        totals = torch.tensor([beam.total for beam in self._beams], dtype=torch.float64, device=logits.device)
        totals = (logits.log_softmax(dim=-1) + totals[:, None]).flatten()
        count = (1 + max(1, len(self._beams[0].state.end_ids))) * self._params.width
        best = totals.topk(min(count, len(totals)))
        vocabulary = logits.shape[-1]
        return [
            _Candidate(self._beams[index // vocabulary], index // vocabulary, index % vocabulary, total)
            for index, total in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _score(self, candidate: _Candidate) -> float:
        return candidate.total / (candidate.beam.state.num_generated_tokens + 1) ** self._params.length_penalty

    def _hypothesis(self, candidate: _Candidate, logits: Tensor, reason: FinishReason) -> Hypothesis:
        beam = candidate.beam
        if reason == "stop":
            return Hypothesis(beam.generated, beam.logprobs, reason, self._score(candidate))
        logprobs = beam.logprobs + self._logprobs(candidate, logits)
        return Hypothesis([*beam.generated, candidate.token], logprobs, reason, self._score(candidate))

    def _logprobs(self, candidate: _Candidate, logits: Tensor) -> list[TokenLogprob]:
        count = candidate.beam.state.request.params.logprobs
        row = logits[candidate.row : candidate.row + 1]
        return [] if count is None else log_probabilities(row, [candidate.token], count)

    def _continue(self, candidates: Sequence[_Candidate], logits: Tensor) -> None:
        """Continue each beam with its best candidate, fork it for the others, and drop beams without candidates."""
        continued_states: set[RequestState] = set()
        beams: list[_Beam] = []
        for candidate in candidates:
            state = candidate.beam.state
            if state in continued_states:
                parent, state = state, replace(state, unforked=0, token_ids=list(state.token_ids))
                self._scheduler.fork(parent, state)
            continued_states.add(state)
            beams.append(_Beam(state, candidate.total, candidate.beam.logprobs + self._logprobs(candidate, logits)))
        for state in self.states:
            if state not in continued_states:
                self._scheduler.remove(state)
        for candidate, beam in zip(candidates, beams, strict=True):
            beam.state.token_ids.append(candidate.token)
        self._beams = beams
