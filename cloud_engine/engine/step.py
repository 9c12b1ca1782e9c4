"""The messages between scheduler and worker: plain data, so that a step can be sent, recorded and replayed.

A sequence keeps one slot from its first plan until it ends or is preempted. A `StepPlan` names only changes: sequences
that are new in their slot, and blocks that a slot did not have before.

The plan of step k + 1 may be sent before the result of step k is read. It reserves blocks for the case that all drafts
of step k are accepted, and the worker computes from the true lengths. `StepSampling` follows once the result of step k
is known, while step k + 1 computes.
"""

from __future__ import annotations

import msgspec

from ...protocol.sampling import ResolvedParams
from .types.outputs import PromptLogprob, TokenLogprob


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that begins, or begins again after a preemption, in a free slot."""

    slot: int
    # Known tokens: the prompt, and the tokens generated before a preemption.
    token_ids: list[int]
    num_prompt_tokens: int
    # Maximum number of generated tokens.
    max_tokens: int
    params: ResolvedParams
    seed: int
    end_ids: frozenset[int]
    block_table: list[int]
    # Leading tokens that the KV cache holds already, and those that the draft model's cache holds.
    num_computed_tokens: int = 0
    num_draft_computed_tokens: int = 0
    # Prompt tokens after the first that have log-probabilities already; None if the prompt is not scored.
    num_scored_tokens: int | None = None
    # Whether to return the embedding of the prompt instead of sampling.
    embed: bool = False
    # Whether each row needs a mask of its grammar (`StepSampling.masks`).
    is_constrained: bool = False


class NewBlocks(msgspec.Struct, frozen=True):
    """KV blocks of a slot, which replace its block table from index `start` on."""

    slot: int
    start: int
    blocks: list[int]


class DraftGrant(msgspec.Struct, frozen=True):
    """Permission for a drafter to propose at most `num_drafts` tokens."""

    drafter: str
    num_drafts: int


class StepPlan(msgspec.Struct, frozen=True):
    """The work of one step. `ended`, `new` and `new_blocks` apply before the step, in this order."""

    id: int
    # Slots to compute, and the number of known tokens to compute of each.
    slots: list[int]
    counts: list[int]
    # Leading slots that only decode: no drafts, grammar, log-probabilities or prompt.
    num_decodes: int = 0
    new: list[NewSequence] = []
    new_blocks: list[NewBlocks] = []
    # Slots whose sequences have ended or were preempted.
    ended: list[int] = []
    # Predicted tokens to verify, by slot.
    drafts: dict[int, list[int]] = {}
    # Drafters to run, by slot.
    grants: dict[int, DraftGrant] = {}


class DraftProposal(msgspec.Struct, frozen=True):
    """The proposal of a drafter. `ends`: the drafter predicts that the answer ends after `token_ids`."""

    token_ids: list[int]
    ends: bool = False


class StepSampling(msgspec.Struct, frozen=True):
    """The grammar masks of a step.

    `masks`: by slot, bit sets of allowed tokens after 0, 1, 2 ... drafts; None after drafts that complete the grammar.
    Further drafts, which the grammar forbids, are not verified. `dropped`: constrained slots whose tokens are not
    needed, because their sequences have ended since the plan.
    """

    id: int
    masks: dict[int, list[bytes | None]] = {}
    dropped: list[int] = []


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step, by slot or in the order of `StepPlan.slots`."""

    id: int
    # New tokens of each slot: the accepted drafts and one more, or none if known tokens are still uncomputed.
    counts: list[int]
    # New tokens of all slots.
    tokens: list[int]
    # Log-probabilities of new tokens, and of prompt tokens, where requested.
    logprobs: dict[int, list[TokenLogprob]] = {}
    prompt_scores: dict[int, list[PromptLogprob]] = {}
    embeddings: dict[int, list[float]] = {}
    # Leading tokens in the draft model's KV cache, where it has computed some.
    draft_computed: dict[int, int] = {}
