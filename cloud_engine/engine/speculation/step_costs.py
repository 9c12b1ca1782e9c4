"""The costs of a step, learned from the steps themselves.

No torch here, and no clock: whoever measures reports, so the same steps always give the same estimates.
"""

from __future__ import annotations

import math

import msgspec

from ..types.recent import Recent

#: Tokens to catch up on, for each sequence, that make a pass of the draft model no slower.
SHORT_LAG = 16
_NEAR = 0.25  # a batch this much larger or smaller tells something about one that was not measured


class StepReport(msgspec.Struct, frozen=True):
    """One step as it was measured."""

    # Sequences in the step, each with one token.
    sequences: int
    # Seconds of the whole step.
    step_s: float
    # Known tokens beyond one per sequence.
    prefill_tokens: int = 0
    # Draft tokens verified.
    draft_tokens: int = 0
    # Sequences a draft model drafted for.
    drafting: int = 0
    # Passes of the draft model.
    passes: int = 0
    # Tokens it caught up on in its first pass.
    lag: int = 0
    # Seconds of drafting.
    draft_s: float = 0.0
    # Seconds of the first of its passes.
    first_pass_s: float = 0.0
    # Draft tokens that were right.
    accepted_tokens: int = 0
    # Seconds of looking for drafts, and of learning what they bring.
    deciding_s: float = 0.0


class StepCosts:
    """Seconds of a step without drafts, of verifying drafts, and of making them; nothing is known until reported."""

    def __init__(self) -> None:
        self._plain: dict[int, Recent] = {}  # sequences -> seconds without drafts
        self._verify: dict[int, dict[int, Recent]] = {}  # class of batch size -> tokens each -> see `verify_s`
        self._first: dict[int, Recent] = {}  # drafting sequences -> seconds of a draft model's first pass in a step
        self._further: dict[int, dict[int, Recent]] = {}  # drafting sequences -> further passes -> seconds of them all
        self._prefill, self._catch_up = Recent(), Recent()  # seconds per token
        self._drafted = False  # in the step before

    def plain_s(self, sequences: int) -> float | None:
        """A step without drafts; None where nothing is sure of batches of about this size.

        All shares are of this: of a single step that was held up, drafts would look as good as free for long.
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
        """The time that verifying `draft_tokens` adds to a step of `plain_s`.

        Measured as a share of that step, by batch size and by draft tokens each, so that it carries over to batches of
        similar size. In between it is interpolated. Longer drafts than were measured are expected to go on as the
        measured ones rise, or half as steeply as proportion would have it where there is but one length: if that is
        too good to be true, a try tells; what that may cost at most is told `in_proportion`, or, where nothing was
        measured, as half of what so many sequences more would take.
        """
        measured = self._shares(sequences)
        each = draft_tokens / sequences
        below = max((length for length in measured if length <= each), default=0)
        above = min((length for length in measured if length > each), default=None)
        share = measured[below].median if below else 0.0
        if above is not None:
            share += (measured[above].median - share) * (each - below) / (above - below)
        elif below:
            expected_rise = 1 if in_proportion else 2
            share += (each - below) * (self._rise(measured) if len(measured) > 1 else share / below / expected_rise)
        elif in_proportion:
            share = each / 2
        return share * plain_s

    def another_token_s(self, sequences: int, length: int, plain_s: float) -> float:
        """The time that one more draft token adds, the `length`-th of a sequence, where others are verified anyway.

        As much as with every further token on average, but no more than it takes to go so far at all: that long drafts
        were slow when they were tried says nothing against short ones.
        """
        measured = self._shares(sequences)
        if len(measured) < 2:
            return 0.0
        before, behind = (self.verify_s(sequences, sequences * each, plain_s) for each in (length - 1, length))
        return max(0.0, min(self._rise(measured) * plain_s, behind - before)) / sequences

    def _rise(self, measured: dict[int, Recent]) -> float:
        """Of the share, with every further token for each sequence."""
        least, most = min(measured), max(measured)
        return max(0.0, measured[most].median - measured[least].median) / (most - least)

    def longest(self, sequences: int) -> int:
        """The longest drafts, in tokens each, of which it is known what verifying them adds."""
        return max(self._shares(sequences), default=0)

    def drafting_s(self, drafting: int, passes: int) -> float:
        """So many passes of the draft model over this many sequences in a step.

        The further ones may be one call, of which a part does not depend on their number: as with `verify_s`, what was
        measured is interpolated, and goes on as it rises.
        """
        if passes == 0:
            return 0.0
        return self._first_pass_s(drafting) + self._further_s(drafting, passes - 1)

    def _first_pass_s(self, drafting: int) -> float:
        nearest = min(self._first, key=lambda known: abs(known - drafting), default=None)
        return self._further_s(drafting, 1) if nearest is None else self._first[nearest].median

    def _further_s(self, drafting: int, passes: int) -> float:
        nearest = min(self._further, key=lambda known: abs(known - drafting), default=None)
        if nearest is None or passes == 0:
            return 0.0
        known = {0: 0.0} | {number: recent.median for number, recent in self._further[nearest].items()}
        longest = max(known)
        if passes > longest:
            below = max(number for number in known if number < longest)
            rise = max(0.0, known[longest] - known[below]) / (longest - below)
            return known[longest] + (passes - longest) * rise
        below, above = max(n for n in known if n <= passes), min(n for n in known if n >= passes)
        share = (passes - below) / max(1, above - below)
        return known[below] + share * (known[above] - known[below])

    @property
    def prompt_token_s(self) -> float | None:
        """The time that a prompt token adds to a step; None where it is not known."""
        return self._prefill.median if self._prefill.is_reliable else None

    def catch_up_s(self, lag: int) -> float:
        """The draft model's time for `lag` tokens that the target has computed and it has not."""
        return self._catch_up.median * lag

    def observe(self, step: StepReport) -> float | None:
        """Returns the seconds of the target in this step without those for prompts; None where these are the most of
        it, so that it says little about the rest.

        The first step with drafts behind one without, or the other way round, is cold: it brings into the caches
        what those that follow it find there.
        """
        cold, self._drafted = self._drafted != (step.draft_tokens > 0), step.draft_tokens > 0
        self._observe_passes(step, cold)
        sequences, target_s = step.sequences, step.step_s - step.draft_s - step.deciding_s
        prefill_s = self._prefill_s(step, target_s)
        if prefill_s > target_s / 2:
            return None
        target_s -= prefill_s
        if step.draft_tokens == 0:
            self._plain_of(sequences).add(target_s, cold=cold)
            return target_s
        plain_s = self.plain_s(sequences)
        if plain_s is not None and 2 * step.draft_tokens >= sequences:  # fewer drown in noise
            shares = self._verify.setdefault(sequences.bit_length(), {})
            each = max(1, round(step.draft_tokens / sequences))
            shares.setdefault(each, Recent()).add(max(0.0, target_s / plain_s - 1), cold=cold)
        return target_s

    def _observe_passes(self, step: StepReport, cold: bool) -> None:
        if step.passes > 1:
            further = self._further.setdefault(step.drafting, {}).setdefault(step.passes - 1, Recent())
            further.add(step.draft_s - step.first_pass_s, cold=cold)
        if step.lag > SHORT_LAG * step.drafting:
            self._catch_up.add(max(0.0, step.first_pass_s - self._first_pass_s(step.drafting)) / step.lag)
        elif step.passes:
            self._first.setdefault(step.drafting, Recent()).add(step.first_pass_s, cold=cold)

    def _prefill_s(self, step: StepReport, target_s: float) -> float:
        """The part of `target_s` that went into prompts, which also teaches what a token of a prompt costs."""
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

    def _plain_of(self, sequences: int) -> Recent:
        known = self._plain.get(sequences)
        if known is None:
            known = self._plain[sequences] = Recent()
        return known

    def _shares(self, sequences: int) -> dict[int, Recent]:
        """By draft tokens each, those of which anything is sure, of batches of this class."""
        known = self._verify.get(sequences.bit_length(), {})
        return {each: share for each, share in known.items() if share.is_reliable}
