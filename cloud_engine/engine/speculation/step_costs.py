"""Costs of a step, learned from reported steps.

Imports no torch and reads no clock, so the same reports always give the same estimates.
"""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec

from ..types.recent_median import RecentMedian

#: Tokens per sequence with which a draft model can catch up in a pass without noticeably slowing the pass.
SHORT_LAG = 16
_NEAR = 0.25  # largest relative difference of batch sizes for which measurements are extrapolated


class StepReport(msgspec.Struct, frozen=True):
    """The measurements of one step."""

    # Sequences in the step, each of which computes at least one known token.
    sequences: int
    # Duration of the whole step, in seconds.
    step_s: float
    # Known tokens computed in addition to one per sequence; mostly prompt tokens.
    prefill_tokens: int = 0
    # Draft tokens verified.
    draft_tokens: int = 0
    # Sequences that a draft model drafted for.
    drafting: int = 0
    # Passes of the draft model.
    passes: int = 0
    # Tokens computed in the draft model's first pass.
    lag: int = 0
    # Duration of drafting, in seconds.
    draft_s: float = 0.0
    # Duration of the draft model's first pass, in seconds.
    first_pass_s: float = 0.0
    accepted_tokens: int = 0
    # Time spent on granting drafts and on learning, in seconds.
    deciding_s: float = 0.0


class StepCosts:
    """Estimated seconds of a step without drafts, of verifying drafts and of drafting, learned from step reports."""

    def __init__(self) -> None:
        self._plain: defaultdict[int, RecentMedian] = defaultdict(RecentMedian)  # sequences -> seconds without drafts
        self._verify: dict[int, dict[int, RecentMedian]] = {}  # batch size class -> draft tokens -> share (`verify_s`)
        self._first: dict[int, RecentMedian] = {}  # drafting sequences -> seconds of a step's first draft pass
        self._further: dict[int, dict[int, RecentMedian]] = {}  # drafting sequences -> further passes -> total seconds
        self._prefill, self._draft_prefill = RecentMedian(), RecentMedian()  # seconds per token
        self._drafted = False  # whether the previous step had drafts

    def plain_s(self, sequences: int) -> float | None:
        """Return the seconds of a step without drafts; None if there are no reliable measurements near this batch size.

        Draft costs are relative to this time, so one slow outlier would make drafts look free for long.
        """
        exact = self._plain.get(sequences)
        if exact is not None and exact.is_reliable:
            return exact.median
        near = {size: step for size, step in self._plain.items() if abs(size - sequences) <= _NEAR * sequences}
        sure = [size for size, step in near.items() if step.is_reliable]
        if sure:
            nearest = min(sure, key=lambda size: abs(size - sequences))
            return near[nearest].median * math.sqrt(sequences / nearest)
        once = sorted(step.median * math.sqrt(sequences / size) for size, step in near.items())
        return once[(len(once) - 1) // 2] if len(once) > 1 else None

    def verify_s(self, sequences: int, draft_tokens: int, plain_s: float, *, in_proportion: bool = False) -> float:
        """Return the seconds that verifying `draft_tokens` adds to a step of `plain_s` seconds.

        Measured costs are shares of `plain_s`, by batch size class and draft length (draft tokens per sequence). The
        cost of other lengths is interpolated, or extrapolated by the measured slope. With only one measured length,
        costs are assumed to grow half as fast as the length, an optimistic guess that a trial corrects. `in_proportion`
        gives an upper estimate: costs grow as fast as the length or, without measurements, half a step per draft token
        of each sequence.
        """
        measured = self._shares(sequences)
        drafted = draft_tokens / sequences
        below = max((length for length in measured if length <= drafted), default=0)
        above = min((length for length in measured if length > drafted), default=None)
        share = measured[below].median if below else 0.0
        if above is not None:
            share += (measured[above].median - share) * (drafted - below) / (above - below)
        elif below:
            expected_rise = 1 if in_proportion else 2
            share += (drafted - below) * (self._rise(measured) if len(measured) > 1 else share / below / expected_rise)
        elif in_proportion:
            share = drafted / 2
        return share * plain_s

    def further_token_s(self, sequences: int, length: int, plain_s: float) -> float:
        """Return the seconds added by one sequence's draft token number `length`, if the step verifies drafts anyway.

        This is the average slope of the measured costs, but at most the difference in cost from length - 1, so that
        slow long drafts do not make short drafts look slow.
        """
        measured = self._shares(sequences)
        if len(measured) < 2:
            return 0.0
        shorter_s, longer_s = (self.verify_s(sequences, sequences * size, plain_s) for size in (length - 1, length))
        return max(0.0, min(self._rise(measured) * plain_s, longer_s - shorter_s)) / sequences

    def _rise(self, measured: dict[int, RecentMedian]) -> float:
        """Return the average increase of the `measured` costs when each sequence gets one more draft token."""
        least, most = min(measured), max(measured)
        return max(0.0, measured[most].median - measured[least].median) / (most - least)

    def longest(self, sequences: int) -> int:
        """Return the longest draft, in tokens per sequence, whose verification has been measured."""
        return max(self._shares(sequences), default=0)

    def drafting_s(self, drafting: int, passes: int) -> float:
        """Return the seconds that `passes` of the draft model over `drafting` sequences take in a step.

        The passes after the first may run in one call with a fixed cost. Their times are therefore not averaged per
        pass, but interpolated and extrapolated as in `verify_s`.
        """
        if passes == 0:
            return 0.0
        return self._first_pass_s(drafting) + self._further_pass_s(drafting, passes - 1)

    def _first_pass_s(self, drafting: int) -> float:
        nearest = min(self._first, key=lambda measured: abs(measured - drafting), default=None)
        return self._further_pass_s(drafting, 1) if nearest is None else self._first[nearest].median

    def _further_pass_s(self, drafting: int, passes: int) -> float:
        nearest = min(self._further, key=lambda measured: abs(measured - drafting), default=None)
        if nearest is None or passes == 0:
            return 0.0
        times = {0: 0.0} | {number: recent.median for number, recent in self._further[nearest].items()}
        longest = max(times)
        if passes > longest:
            below = max(number for number in times if number < longest)
            rise = max(0.0, times[longest] - times[below]) / (longest - below)
            return times[longest] + (passes - longest) * rise
        below, above = max(n for n in times if n <= passes), min(n for n in times if n >= passes)
        share = (passes - below) / max(1, above - below)
        return times[below] + share * (times[above] - times[below])

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds that a prompt token adds to a step; None if unknown."""
        return self._prefill.median if self._prefill.is_reliable else None

    def draft_prefill_s(self, lag: int) -> float:
        """Return the draft model's seconds for computing `lag` tokens that the target has already computed."""
        return self._draft_prefill.median * lag

    def observe(self, step: StepReport) -> float | None:
        """Update the costs with a finished step.

        Return the seconds of the target model without prefill; None if prefill took most of the step. A step is cold
        if it has drafts and the previous step had none, or the reverse: processor caches lack its data.
        """
        cold, self._drafted = self._drafted != (step.draft_tokens > 0), step.draft_tokens > 0
        self._observe_passes(step, cold)
        sequences, target_s = step.sequences, step.step_s - step.draft_s - step.deciding_s
        prefill_s = self._prefill_s(step, target_s)
        if prefill_s > target_s / 2:
            return None
        target_s -= prefill_s
        if step.draft_tokens == 0:
            self._plain[sequences].add(target_s, cold=cold)
            return target_s
        plain_s = self.plain_s(sequences)
        if plain_s is not None and 2 * step.draft_tokens >= sequences:  # noise hides the cost of fewer drafts
            shares = self._verify.setdefault(sequences.bit_length(), {})
            drafted = max(1, round(step.draft_tokens / sequences))
            shares.setdefault(drafted, RecentMedian()).add(max(0.0, target_s / plain_s - 1), cold=cold)
        return target_s

    def _observe_passes(self, step: StepReport, cold: bool) -> None:
        if step.passes > 1:
            further = self._further.setdefault(step.drafting, {}).setdefault(step.passes - 1, RecentMedian())
            further.add(step.draft_s - step.first_pass_s, cold=cold)
        if step.lag > SHORT_LAG * step.drafting:
            self._draft_prefill.add(max(0.0, step.first_pass_s - self._first_pass_s(step.drafting)) / step.lag)
        elif step.passes:
            self._first.setdefault(step.drafting, RecentMedian()).add(step.first_pass_s, cold=cold)

    def _prefill_s(self, step: StepReport, target_s: float) -> float:
        """Return the part of `target_s` spent on prompts, and learn the cost of a prompt token."""
        if step.prefill_tokens == 0:
            return 0.0
        if step.prefill_tokens >= step.sequences:
            plain_s = self.plain_s(step.sequences)
            if plain_s is None:
                tokens = step.sequences + step.prefill_tokens + step.draft_tokens
                self._prefill.add(target_s / tokens)
            else:
                rest_s = plain_s + self.verify_s(step.sequences, step.draft_tokens, plain_s)
                self._prefill.add(max(0.0, target_s - rest_s) / step.prefill_tokens)
        return self._prefill.median * step.prefill_tokens

    def _shares(self, sequences: int) -> dict[int, RecentMedian]:
        """Return the reliable measurements for `verify_s` in this batch size class, by draft tokens per sequence."""
        shares = self._verify.get(sequences.bit_length(), {})
        return {drafted: share for drafted, share in shares.items() if share.is_reliable}
