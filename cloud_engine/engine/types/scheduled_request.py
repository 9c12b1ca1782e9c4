"""What a step is to compute of one request. No torch here."""

from __future__ import annotations

import msgspec

from ..speculation.drafter import Drafter
from .request import RequestState


class ScheduledRequest(msgspec.Struct, eq=False):
    """One request's share of a step: known tokens from `start`, then `draft_ids` to verify.

    What it says of the request's tokens holds until the request has got what came of the step.

    `drafter` is to propose `num_drafts` of them; where it is None they come from the request's prediction.
    `draft_ends`: it holds that the answer ends behind `draft_ids`.
    """

    state: RequestState
    num_tokens: int
    draft_ids: list[int] = []
    drafter: Drafter | None = None
    num_drafts: int = 0
    draft_ends: bool = False

    @property
    def start(self) -> int:
        """Position of the first of the known tokens."""
        return self.state.num_computed_tokens

    @property
    def is_caught_up(self) -> bool:
        """Whether this step reaches the last known token, and therefore yields a new one."""
        return self.start + self.num_tokens == len(self.state.token_ids)

    @property
    def num_samples(self) -> int:
        """Rows to sample: one behind the last known token and one behind each draft token; none for an embedding."""
        return 1 + len(self.draft_ids) if self.is_caught_up and not self.state.request.embed else 0

    @property
    def num_prompt_scores(self) -> int:
        """Rows before those to sample whose logits tell how likely the next token of the prompt was."""
        state = self.state
        if state.request.params.prompt_logprobs is None:
            return 0
        first = max(self.start, len(state.prompt_logprobs))
        return max(0, min(self.start + self.num_tokens, state.num_prompt_tokens - 1) - first)
