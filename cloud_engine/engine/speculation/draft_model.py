"""The draft model: a small model that guesses the next tokens, which the target verifies in one pass.

Leviathan et al. 2023, without rejection sampling: a draft token is accepted if and only if it is the token that the
target samples at that position (see `sampler`). The draft model samples with the target's noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from ....kernels.attention.types import QuerySpan
from ....protocol.errors import ConfigurationError
from ...models.causal_model import CausalModel
from ...models.config import CausalConfig
from ..config import EngineConfig
from ..worker.devices import HostCopy, to_device
from ..worker.model_runner import Chunk, Runner, graph_limits
from ..worker.sampler import SamplingRow, SamplingRows, sample, sample_on_device
from ..worker.warm_up import extension_s, make_ready, step_profile
from .cost_table import DraftingCosts
from .drafter import Drafter

if TYPE_CHECKING:
    from ..kv.sizing import KVCacheSize
    from ..types.request_state import RequestState
    from ..worker.slots import RowOf, SlotState


class DraftModel(Drafter):
    """A drafter that runs a model. Its KV cache uses the target's block tables and is filled only when needed."""

    name = "draft"
    takes_passes = True

    def __init__(self, draft: CausalModel, target: CausalConfig, sizes: KVCacheSize, config: EngineConfig) -> None:
        """Set up the runner. Its logits are cut or padded to the target's vocabulary, which may have another size."""
        self._runner = Runner(draft, sizes.num_blocks, config.block_size, cache=config.cache)
        # After full acceptance, the draft model lacks two tokens of each sequence.
        limits = graph_limits(sizes.context_length, config, 2 * config.max_num_seqs)
        make_ready(self._runner, limits, config.max_num_batched_tokens)
        self._most_tokens = config.max_num_batched_tokens
        self._block_size, self._reach, self._window = config.block_size, draft.config.reach, sizes.window
        self._rows = draft.config.vocab_size
        self._missing_rows = target.vocab_size - self._rows
        # `extend` cannot mask padding rows beyond the target's vocabulary.
        self._can_extend = self._missing_rows >= 0 and self._runner.can_extend
        if config.draft_length == "adaptive":
            self.costs = self._measured(config)

    @property
    def runner(self) -> Runner:
        return self._runner

    def offer(self, state: RequestState, limit: int) -> int:
        if state.num_pending_tokens or not self._can_follow(state.num_computed_tokens, state.num_draft_computed_tokens):
            return 0  # its first pass needs all known tokens
        return limit

    def lag(self, state: RequestState) -> int:
        return len(state.token_ids) - state.num_draft_computed_tokens

    def propose(self, batch: Sequence[SlotState], row_of: RowOf) -> None:
        """Draft tokens for the granted requests. A draft stops before an end token, which only the target generates.

        The first pass also computes tokens that only the target has computed so far, such as prompts, even while the
        target is still prefilling them. If a request has too many such tokens for one pass, the draft model computes
        them over several passes, and the request gets no drafts until then."""
        drafting, chunks = self._first_pass(batch)
        if not chunks:
            return
        logits = self._run(chunks)
        if not drafting:
            return
        rows = [row_of(item, 0) for item in drafting]
        if self._runner.runs_ahead and self._can_extend and all(row.is_plain for row in rows):
            self._continue_on_device(sample_on_device(logits, SamplingRows.of(rows)), drafting, rows)
        else:
            _take_each(drafting, sample(logits, rows))
            self._continue([item for item in drafting if _can_continue(item)], row_of)

    def _measured(self, config: EngineConfig) -> DraftingCosts:
        """Measure the passes. Overwrites the KV cache."""
        profile = step_profile(self._runner, config)
        first_s = {size: seconds for (size, drafts), seconds in profile.items() if drafts == 0}
        further_s = {size: extension_s(self._runner, size) for size in first_s} if self._can_extend else first_s
        longest = max(drafts for size, drafts in profile if size == 1)
        return DraftingCosts(first_s, further_s, max(0.0, profile[1, longest] - first_s[1]) / longest)

    def _continue_on_device(self, first: Tensor, drafting: list[SlotState], rows: list[SamplingRow]) -> None:
        """Extend each draft after its first token, without reading any token before all passes are launched.

        `first` (drafting,) int64 are the first tokens, sampled with `rows`.
        """
        firsts = HostCopy(first)
        longer = [at for at, item in enumerate(drafting) if item.num_drafts > 1]
        longer.sort(key=lambda at: drafting[at].num_drafts, reverse=True)
        spans = [self._rest(drafting[at]) for at in longer]
        next_rows = [msgspec.structs.replace(rows[at], position=rows[at].position + 1) for at in longer]
        index = to_device(torch.tensor(longer, dtype=torch.int64), first.device)
        rest = self._runner.extend(first[index], spans, next_rows) if longer else []
        continued = dict(zip(longer, rest, strict=True))
        for at, (item, token) in enumerate(zip(drafting, firsts.tolist(), strict=True)):
            tokens = [token, *continued.get(at, [])]
            item.num_draft_computed_tokens += len(tokens) - 1
            _take(item, tokens)

    def _continue(self, drafting: list[SlotState], row_of: RowOf) -> None:
        """Extend each draft after its first token, in one call or pass by pass."""
        if self._can_extend:
            rows = [(item, row_of(item, 1)) for item in drafting]
            self._extend_at_once([(item, row) for item, row in rows if row.is_plain])
            drafting = [item for item, row in rows if not row.is_plain]
        while drafting:
            logits = self._run([self._extend(item) for item in drafting])
            _take_each(drafting, sample(logits, [row_of(item, len(item.draft_ids)) for item in drafting]))
            drafting = [item for item in drafting if _can_continue(item)]

    def _first_pass(self, batch: Sequence[SlotState]) -> tuple[list[SlotState], list[Chunk]]:
        """Return the drafting requests, and the chunks of the first pass. Chunks of drafting requests come first."""
        drafting: list[SlotState] = []
        chunks: list[Chunk] = []
        budget = self._most_tokens
        taking_part = [item for item in batch if item.drafter == self.name or self._keeps_up(item)]
        for item in sorted(taking_part, key=lambda item: item.drafter != self.name):
            start, end = item.num_draft_computed_tokens, item.num_computed_tokens + item.num_tokens
            stop = min(end, start + budget)
            if stop <= start:
                continue
            drafts = item.drafter == self.name and stop == end
            drafting += [item] if drafts else []
            chunks.append(self._chunk(item.token_ids[start:stop].tolist(), start, item, int(drafts)))
            item.num_draft_computed_tokens = stop
            budget -= stop - start
        return drafting, chunks

    def _keeps_up(self, item: SlotState) -> bool:
        """Return whether the item is a prompt chunk that later chunks follow, and whose answer may get drafts."""
        may_get_drafts = item.num_generated_tokens + 1 < item.sequence.max_tokens
        if item.is_caught_up or not may_get_drafts:
            return False
        return self._can_follow(item.num_computed_tokens, item.num_draft_computed_tokens)

    def _can_follow(self, num_computed: int, num_drafted: int) -> bool:
        """Return whether the next query's blocks are all still allocated: a sliding window may have released some."""
        if self._reach is None or self._window is None:
            return True
        oldest, kept = num_drafted - self._reach + 1, num_computed - self._window.num_tokens + 1
        return max(0, oldest) // self._block_size >= max(0, kept) // self._block_size

    def _extend(self, item: SlotState) -> Chunk:
        position = item.num_known_tokens + len(item.draft_ids) - 1
        item.num_draft_computed_tokens = position + 1
        return self._chunk(item.draft_ids[-1:], position, item, 1)

    def _extend_at_once(self, drafting: list[tuple[SlotState, SamplingRow]]) -> None:
        if not drafting:
            return
        drafting.sort(key=lambda pair: pair[0].num_drafts, reverse=True)
        first = self._known([item.draft_ids[0] for item, _ in drafting])
        spans, rows = [self._rest(item) for item, _ in drafting], [row for _, row in drafting]
        for (item, _), tokens in zip(drafting, self._runner.extend(first, spans, rows), strict=True):
            item.num_draft_computed_tokens += len(tokens)
            _take(item, tokens)

    def _rest(self, item: SlotState) -> QuerySpan:
        """Return the span of the draft tokens to compute: all but the last, which no further draft token follows."""
        return QuerySpan(item.num_known_tokens, item.num_drafts - 1, item.block_table)

    def _chunk(self, token_ids: list[int], start: int, state: SlotState, num_logits: int) -> Chunk:
        return Chunk(self._known(token_ids), start, state.block_table, num_logits)

    def _known(self, token_ids: list[int]) -> list[int]:
        """Clamp token ids to the draft model's vocabulary; larger ids are padding rows that no text produces."""
        return [min(token_id, self._rows - 1) for token_id in token_ids] if self._missing_rows > 0 else token_ids

    def _run(self, chunks: list[Chunk]) -> Tensor:
        """Compute logits and pad or cut them to the target's width, which sampling parameters and masks expect."""
        logits = self._runner.run(chunks)
        return functional.pad(logits, (0, self._missing_rows), value=-float("inf")) if self._missing_rows else logits


def _take_each(drafting: Sequence[SlotState], tokens: Sequence[int]) -> None:
    for item, token in zip(drafting, tokens, strict=True):
        item.draft_ids.append(token)


def _take(item: SlotState, tokens: list[int]) -> None:
    """Append draft tokens up to the first end token."""
    before_end = list(takewhile(lambda token: token not in item.sequence.end_ids, tokens))
    item.draft_ids += before_end
    item.draft_ends = len(before_end) < len(tokens)


def _can_continue(item: SlotState) -> bool:
    """Return whether drafting may go beyond the last token. If that is an end token, remove it and return False."""
    if item.draft_ids[-1] in item.sequence.end_ids:
        item.draft_ids.pop()
        item.draft_ends = True
        return False
    return len(item.draft_ids) < item.num_drafts


def check_same_vocabulary(
    target_rows: int, draft_rows: int, target: Mapping[str, int] | None, draft: Mapping[str, int] | None
) -> None:
    """Raise ConfigurationError if the draft model's token ids differ from the target's.

    `target` and `draft` map tokens to ids; None for a model without a tokenizer. If either is None, the sizes of the
    output layers must be equal. Otherwise they may differ, because output layers are often padded.
    """
    if target is None or draft is None:
        if target_rows != draft_rows:
            raise _refusal(f"the draft model has {draft_rows} tokens, the target model {target_rows}")
        return
    lacking = [token for token, token_id in target.items() if token_id >= draft_rows]
    if lacking:
        raise _refusal(f"the draft model lacks {len(lacking)} tokens of the target model, such as {lacking[0]!r}")
    names = {token_id: token for token, token_id in draft.items()}
    different = [token for token, token_id in target.items() if names.get(token_id, token) != token]
    if different:
        token_id = target[different[0]]
        raise _refusal(
            f"{len(different)} of {len(target)} tokens differ, such as id {token_id}: {names[token_id]!r} in the draft "
            f"model, {different[0]!r} in the target"
        )


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The draft model cannot be used: {reason}. Use a draft model with the target's tokenizer, or none: "
        "predictions in requests are verified without a draft model.",
        param="draft",
    )
