"""The requests to the engine: tokens in, and how to go on from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....protocol.sampling import SamplingParams
from ....protocol.structured import Constraint


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Options of a beam search (`beam_search`)."""

    # Beams.
    width: int
    # Exponent of the length by which a finished beam's score is divided.
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Tokens in, tokens out."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    # Tokens of the request's `prediction`, to be verified as a draft.
    draft_ids: list[int] = field(default_factory=list[int])
    # Answers wanted. They share the prompt's blocks until they write to them; with a `beam`, the `n` best beams.
    n: int = 1
    priority: int = 0
    """Lower goes first, under policy "priority"."""
    # Only requests with the same salt share cached prefixes, so that timings tell nobody what others have asked.
    cache_salt: str = ""
    # Beam search instead of sampling. It takes no drafts, and its answers come out together at its end.
    beam: BeamParams | None = None
    # The constraint on every answer.
    constraint: Constraint | None = None
    # Generate nothing: the prompt's embedding is wanted.
    embed: bool = False
    # Somebody reads along. Without, a client may bundle tokens, and drop the last ones of an aborted request.
    streamed: bool = True

    @property
    def num_branches(self) -> int:
        """Answers in the making at the same time."""
        return self.n if self.beam is None else self.beam.width

    @property
    def uses_prefix_cache(self) -> bool:
        """An embedding needs the hidden states of every token, and the cache has none: it neither looks nor adds."""
        return not self.embed
