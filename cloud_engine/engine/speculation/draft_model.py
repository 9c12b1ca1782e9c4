"""The draft model: a small model that guesses the next tokens, which the target verifies in one pass.

Leviathan et al. 2023, without rejection sampling: a draft token is accepted if and only if it is the token that the
target samples at that position (see `sampler`). The draft model samples with the target's noise.
"""

# torch leaves `from_numpy` and `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....kernels.attention.block_tables import BlockTables
from ....kernels.attention.ragged_batch import RaggedBatch
from ....kernels.runtime.transfer import HostCopy, to_device
from ....protocol.errors import ConfigurationError
from ...models.causal_model import CausalModel
from ...models.config import CausalConfig
from ..config import EngineConfig
from ..worker.model_runner import ForwardBatch, Runner, graph_limits
from ..worker.sampler import SamplingRows, sample
from ..worker.warm_up import extension_s, make_ready, step_profile
from .cost_table import DraftingCosts
from .drafter import Drafter

if TYPE_CHECKING:
    from ..kv.sizing import KVCacheSize
    from ..types.request_state import RequestState
    from ..worker.slots import RowsOf, SlotState


class DraftModel(Drafter):
    """A drafter that runs a model. Its KV cache uses the target's block tables and is filled only when needed."""

    name = "draft"
    takes_passes = True

    def __init__(
        self,
        draft: CausalModel,
        target: CausalConfig,
        sizes: KVCacheSize,
        config: EngineConfig,
        tables: BlockTables | None = None,
    ) -> None:
        """Set up the runner. Its logits are cut or padded to the target's vocabulary, which may have another size.

        `tables`: the target's block tables, which CUDA graphs need."""
        self._runner = Runner(draft, sizes.num_blocks, config.block_size, tables=tables, cache=config.cache)
        # After full acceptance, the draft model lacks two tokens of each sequence.
        limits = graph_limits(config, 2 * config.max_num_seqs)
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

    def propose(self, batch: Sequence[SlotState], rows_of: RowsOf) -> None:
        """Draft tokens for the granted requests. A draft stops before an end token, which only the target generates.

        The first pass also computes tokens that only the target has computed so far, such as prompts, even while the
        target is still prefilling them. If a request has too many such tokens for one pass, the draft model computes
        them over several passes, and the request gets no drafts until then."""
        items, token_ids, num_drafting = self._first_pass(batch)
        if not items:
            return
        logits = self._run(items, token_ids, num_drafting)
        drafting = items[:num_drafting]
        if not drafting:
            return
        rows = rows_of(drafting)
        first = sample(logits, rows)
        if self._runner.runs_ahead and self._can_extend and rows.are_plain.all():
            self._continue_on_device(first, drafting, rows)
        else:
            self._continue(_taken(drafting, first), rows_of)

    def _measured(self, config: EngineConfig) -> DraftingCosts:
        """Measure the passes. Overwrites the KV cache."""
        profile = step_profile(self._runner, config)
        first_s = {size: seconds for (size, drafts), seconds in profile.items() if drafts == 0}
        further_s = {size: extension_s(self._runner, size) for size in first_s} if self._can_extend else first_s
        longest = max(drafts for size, drafts in profile if size == 1)
        return DraftingCosts(first_s, further_s, max(0.0, profile[1, longest] - first_s[1]) / longest)

    def _continue_on_device(self, first: Tensor, drafting: list[SlotState], rows: SamplingRows) -> None:
        """Extend each draft after its first token, without reading any token before all passes are launched.

        `first` (drafting,) int64 are the first tokens, sampled with `rows`.
        """
        firsts = HostCopy(first)
        longer = _longest_first(drafting, [at for at, item in enumerate(drafting) if item.num_drafts > 1])
        index = to_device(torch.tensor(longer, dtype=torch.int64), first.device)
        rest = self._extend([drafting[at] for at in longer], first[index], rows.continued(longer, 1))
        continued = dict(zip(longer, rest, strict=True))
        for at, (item, token) in enumerate(zip(drafting, firsts.tolist(), strict=True)):
            _take(item, [token, *continued.get(at, [])])

    def _continue(self, drafting: list[SlotState], rows_of: RowsOf) -> None:
        """Extend each draft after its first token, in one call or pass by pass."""
        if self._can_extend and drafting:
            rows = rows_of(drafting)
            plain = _longest_first(drafting, np.flatnonzero(rows.are_plain).tolist())
            items = [drafting[at] for at in plain]
            extended = self._extend(items, [item.draft_ids[0] for item in items], rows.continued(plain))
            for item, tokens in zip(items, extended, strict=True):
                _take(item, tokens)
            drafting = [item for item, is_plain in zip(drafting, rows.are_plain, strict=True) if not is_plain]
        while drafting:
            logits = self._run(drafting, [item.draft_ids[-1:] for item in drafting], len(drafting))
            drafting = _taken(drafting, sample(logits, rows_of(drafting)))

    def _first_pass(self, batch: Sequence[SlotState]) -> tuple[list[SlotState], list[Sequence[int]], int]:
        """Return the requests of the first pass, the tokens to compute of each, and how many requests get drafts.

        Requests that get drafts come first."""
        items: list[SlotState] = []
        token_ids: list[Sequence[int]] = []
        budget, num_drafting = self._most_tokens, 0
        taking_part = [item for item in batch if item.drafter == self.name or self._keeps_up(item)]
        for item in sorted(taking_part, key=lambda item: item.drafter != self.name):
            start, end = item.num_draft_computed_tokens, item.num_computed_tokens + item.num_tokens
            stop = min(end, start + budget)
            if stop <= start:
                continue
            items.append(item)
            token_ids.append(item.token_ids[start:stop].tolist())
            num_drafting += item.drafter == self.name and stop == end
            budget -= stop - start
        return items, token_ids, num_drafting

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

    def _extend(self, items: Sequence[SlotState], first: Tensor | Sequence[int], rows: SamplingRows) -> list[list[int]]:
        """Return the tokens after each item's `first` draft token, by `Runner.extend`. Longer drafts come first."""
        if not items:
            return []
        # The last draft token is not computed, because no further draft token follows.
        extended = self._runner.extend(first, _batch(items, [item.num_drafts - 1 for item in items]), rows)
        for item, tokens in zip(items, extended, strict=True):
            item.num_draft_computed_tokens += len(tokens)
        return extended

    def _run(self, items: Sequence[SlotState], token_ids: Sequence[Sequence[int]], num_logits: int) -> Tensor:
        """Compute the next `token_ids` of each item, and return logits after those of the first `num_logits` items.

        The logits are padded or cut to the target's width, which sampling parameters and masks expect.
        """
        batch = _batch(items, [len(tokens) for tokens in token_ids])
        # Larger ids are padding rows of the target, which no text produces.
        known = np.minimum(np.concatenate(token_ids).astype(np.int64), self._rows - 1)
        last = batch.first_row[1 : 1 + num_logits] - 1
        logits = self._runner.compute(ForwardBatch(batch, torch.from_numpy(known), last))
        for item, tokens in zip(items, token_ids, strict=True):
            item.num_draft_computed_tokens += len(tokens)
        return functional.pad(logits, (0, self._missing_rows), value=-float("inf")) if self._missing_rows else logits


def _batch(items: Sequence[SlotState], rows: Sequence[int]) -> RaggedBatch:
    """Return the batch of the next `rows` tokens of each item that the draft model has not computed."""
    slots = np.array([item.sequence.slot for item in items])
    start = np.array([item.num_draft_computed_tokens for item in items])
    return items[0].slots.batch(slots, start, np.array(rows))


def _longest_first(items: Sequence[SlotState], indices: list[int]) -> list[int]:
    return sorted(indices, key=lambda at: items[at].num_drafts, reverse=True)


def _taken(drafting: Sequence[SlotState], first: Tensor) -> list[SlotState]:
    """Append a token to each draft, and return the items whose drafts may become longer."""
    for item, token in zip(drafting, first.tolist(), strict=True):
        _take(item, [token])
    return [item for item in drafting if not item.draft_ends and len(item.draft_ids) < item.num_drafts]


def _take(item: SlotState, tokens: list[int]) -> None:
    """Append draft tokens up to the first end token."""
    before_end = list(takewhile(lambda token: token not in item.sequence.end_ids, tokens))
    item.draft_ids += before_end
    item.draft_ends = len(before_end) < len(tokens)


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
