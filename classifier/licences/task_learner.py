"""One task: its sampled rows, the policies under test, and the licence that results from them.

Everything follows from the rows in their order, so a corrected grade is a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .betting import LadderTest, RevocationTest

#: Rows before the first policy with gates is fitted. Each later fit waits until the rows have doubled.
FIRST_FIT = 60
# A task without a licence after `_ROWS_OF_PROOF` rows hardly gets one, so ever fewer of its requests are sampled.
_ROWS_OF_GROWTH, _ROWS_COMPARED, _ROWS_OF_PROOF = 150, 200, 2_000

RequestT = TypeVar("RequestT")
_RequestT_contra = TypeVar("_RequestT_contra", contravariant=True)


class LadderPolicy(Protocol[_RequestT_contra]):
    """A frozen policy with thresholds in order, the safest first."""

    @property
    def steps(self) -> int: ...

    def first_step(self, request: _RequestT_contra) -> int:
        """Return the first step that keeps a request local; `steps` if none does, as after a failed check."""
        ...


@dataclass(frozen=True, slots=True)
class SampledRow(Generic[RequestT]):
    """A request that both tiers answered. It was sampled before any gate saw it, whatever its text."""

    request: RequestT
    # Scores from 0 to 1. A row without a grade in time counts as 0 and 1.
    local: float
    cloud: float


#: Fits a policy to rows; None if they do not suffice.
Fit = Callable[[Sequence[SampledRow[RequestT]]], "LadderPolicy[RequestT] | None"]


@dataclass(frozen=True, slots=True)
class Licence(Generic[RequestT]):
    """Permission to answer requests on the device that `policy` keeps local at `step`."""

    policy: LadderPolicy[RequestT]
    step: int

    def keeps(self, request: RequestT) -> bool:
        return self.policy.first_step(request) <= self.step


class _Candidate(Generic[RequestT]):
    """A policy under test. `number` counts all tests of the task, which share `delta`."""

    def __init__(self, policy: LadderPolicy[RequestT], number: int, quality: float, delta: float) -> None:
        self.policy = policy
        # The sum over all numbers is delta.
        self.test = LadderTest(policy.steps, quality, delta / ((number + 1) * (number + 2)))

    @property
    def licence(self) -> Licence[RequestT] | None:
        licensed = self.test.num_licensed
        return Licence(self.policy, licensed - 1) if licensed else None


class TaskLearner(Generic[RequestT]):
    """Licenses a task to the device while, and only while, its rows prove `quality` with probability 1 - `delta`.

    `first` is tested from the first row on; policies that `fit` returns are tested on later rows only. At most three
    policies are under test: the first, the newest, and the best of the others.
    """

    def __init__(
        self, first: LadderPolicy[RequestT], fit: Fit[RequestT], *, quality: float = 0.95, delta: float = 0.1
    ) -> None:
        self._fit, self._quality, self._delta = fit, quality, delta
        self.rows: list[SampledRow[RequestT]] = []
        self.num_revocations = 0
        self._num_tests = 0
        self._next_fit = FIRST_FIT
        self._first = self._candidate(first)
        self._fitted: list[_Candidate[RequestT]] = []
        self._in_force: _Candidate[RequestT] | None = None
        self._kept = 0.0
        self._watch = RevocationTest(quality)

    @property
    def licence(self) -> Licence[RequestT] | None:
        """The licence in force; None if all requests belong to the cloud."""
        return None if self._in_force is None else self._in_force.licence

    @property
    def evidence(self) -> float:
        """Share of the evidence that the next step of a licence needs, on a scale of logarithms."""
        return max(candidate.test.evidence for candidate in (self._first, *self._fitted))

    def sampling_rate(self, exploration: float) -> float:
        """Return the probability with which to sample the next request, at least `exploration`.

        At first, all requests of a task without a licence are sampled. A licence that keeps few requests local gets
        more samples, as long as they add much to the rows.
        """
        if self._in_force is None:
            return max(exploration, min(1.0, _ROWS_OF_PROOF / max(1, len(self.rows))))
        return max(exploration, (1.0 - self._kept) * min(1.0, _ROWS_OF_GROWTH / len(self.rows)))

    def observe(self, row: SampledRow[RequestT]) -> None:
        """Add a sampled row. May grant, extend or revoke the licence, and fit another policy."""
        if (licence := self.licence) is not None:
            self._watch.observe(row.local if licence.keeps(row.request) else row.cloud, row.cloud)
        self.rows.append(row)
        grown = False
        for candidate in (self._first, *self._fitted):
            before = candidate.test.num_licensed
            candidate.test.observe(row.local, row.cloud, candidate.policy.first_step(row.request))
            grown |= candidate.test.num_licensed > before
        if self._watch.is_revoked:
            self._revoke()
        elif grown:
            self._choose()
        if len(self.rows) >= self._next_fit:
            self._next_fit = 2 * len(self.rows)
            if (policy := self._fit(self.rows)) is not None:
                best = max(self._fitted, key=self._standing, default=None)
                self._fitted = [self._candidate(policy)] if best is None else [best, self._candidate(policy)]

    def _candidate(self, policy: LadderPolicy[RequestT]) -> _Candidate[RequestT]:
        self._num_tests += 1
        return _Candidate(policy, self._num_tests - 1, self._quality, self._delta)

    def _choose(self) -> None:
        """Put the licence in force that keeps most of the newest rows local."""
        newest = self.rows[-_ROWS_COMPARED:]
        for candidate in (self._first, *self._fitted):
            licence = candidate.licence
            kept = 0.0 if licence is None else sum(licence.keeps(row.request) for row in newest) / len(newest)
            if licence is not None and (self._in_force is None or kept > self._kept or candidate is self._in_force):
                self._in_force, self._kept = candidate, kept

    def _standing(self, candidate: _Candidate[RequestT]) -> tuple[bool, int, float]:
        return candidate is self._in_force, candidate.test.num_licensed, candidate.test.evidence

    def _revoke(self) -> None:
        """Take the licence back. All policies must prove themselves again, on new rows."""
        self.num_revocations += 1
        self._watch = RevocationTest(self._quality)
        self._in_force, self._kept = None, 0.0
        self._first = self._candidate(self._first.policy)
        self._fitted = [self._candidate(candidate.policy) for candidate in self._fitted]
        self._next_fit = len(self.rows) + FIRST_FIT
