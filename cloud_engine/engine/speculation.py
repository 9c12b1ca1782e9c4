"""The draft model: a small model that guesses the next tokens, so that the large one can check them in one pass.

Leviathan et al. 2023, in the form that needs no rejection sampling: see `sampler` on why a draft token is accepted if
and only if it is the token the target samples at that position. To hit it often, the draft samples with the target's
parameters and the target's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...protocol.errors import ConfigurationError
from ..models.decoder import Decoder
from .runner import Chunk, Runner
from .sampler import SamplingRow, sample
from .scheduler import ScheduledRequest

RowOf = Callable[[ScheduledRequest, int], SamplingRow]


class DraftModel:
    """Proposes the tokens that the scheduler granted. Its KV cache uses the target's block tables."""

    def __init__(self, draft: Decoder, target: Decoder, num_blocks: int, block_size: int) -> None:
        if draft.config.vocab_size != target.config.vocab_size:
            raise ConfigurationError(
                f"The draft model has a vocabulary of {draft.config.vocab_size}, the target of "
                f"{target.config.vocab_size}: a draft model must share the target's tokenizer.",
                param="draft",
            )
        self._runner = Runner(draft, num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(copies)

    def propose(self, batch: Sequence[ScheduledRequest], row_of: RowOf) -> None:
        """Fill in `draft_ids` where the scheduler granted model drafts.

        The first pass also takes every request of the step along through its known tokens, so that the cached blocks
        of both models stay equally far.
        """
        drafting = [item for item in batch if item.num_model_drafts]
        logits = self._runner.run([_catch_up(item) for item in batch])
        for item in batch:
            item.state.num_draft_computed_tokens = item.start + item.num_tokens
        while drafting:
            tokens = sample(logits, [row_of(item, len(item.draft_ids)) for item in drafting])
            for item, token in zip(drafting, tokens, strict=True):
                item.draft_ids.append(token)
            drafting = [item for item in drafting if len(item.draft_ids) < item.num_model_drafts]
            if drafting:
                logits = self._runner.run([_extend(item) for item in drafting])


def _catch_up(item: ScheduledRequest) -> Chunk:
    state, end = item.state, item.start + item.num_tokens
    start = state.num_draft_computed_tokens
    return Chunk(state.token_ids[start:end], start, state.block_table, 1 if item.num_model_drafts else 0)


def _extend(item: ScheduledRequest) -> Chunk:
    position = len(item.state.token_ids) + len(item.draft_ids) - 1
    item.state.num_draft_computed_tokens = position + 1
    return Chunk(item.draft_ids[-1:], position, item.state.block_table, 1)
