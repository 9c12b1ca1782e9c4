"""What is asked of the engine: tokens in, and how to go on from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....protocol.sampling import SamplingParams
from ....protocol.structured import Constraint


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Options of a beam search (`beam_search`)."""

    width: int
    """Beams."""
    length_penalty: float = 1.0
    """Exponent of the length by which a finished beam's score is divided."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Tokens in, tokens out."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    draft_ids: list[int] = field(default_factory=list[int])
    """Tokens of the request's `prediction`, to be verified as a draft."""
    n: int = 1
    """Answers wanted. They share the prompt's blocks until they write to them; with a `beam`, the `n` best beams."""
    priority: int = 0
    """Lower goes first, under policy "priority"."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes, so that timings tell nobody what others have asked."""
    beam: BeamParams | None = None
    """Beam search instead of sampling. It takes no drafts, and its answers come out together at its end."""
    constraint: Constraint | None = None
    """What every answer must look like."""
    embed: bool = False
    """Generate nothing: the prompt's embedding is wanted."""
    streamed: bool = True
    """Somebody reads along. Without, a client may bundle tokens, and drop the last ones of an aborted request."""

    @property
    def num_branches(self) -> int:
        """Answers in the making at the same time."""
        return self.n if self.beam is None else self.beam.width

    @property
    def uses_prefix_cache(self) -> bool:
        """An embedding needs the hidden states of every token, and the cache has none: it neither looks nor adds."""
        return not self.embed
