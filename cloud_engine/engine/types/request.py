"""Requests to the engine: the prompt's tokens and the options of generation."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial

from ....protocol.sampling import SamplingParams
from ....protocol.structured import Constraint

#: Largest distance of a request's priority from 0. Bounds the time for which other requests can overtake a request.
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Resumption:
    """The part of a request that the client has received already, before a failure of the engine."""

    # Generated tokens of each answer that has not ended, by the answer's index.
    token_ids: dict[int, list[int]]
    # Prompt tokens that were found in the prefix cache at first.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to generate answers to a prompt, or to embed it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    # Tokens of the request's `prediction`, which the engine verifies as a draft.
    draft_ids: list[int] = field(default_factory=list[int])
    # Number of answers. The first computes the prompt, and the others find its full blocks in the prefix cache.
    n: int = 1
    # Priority with `--scheduling-policy priority`, at most `MAX_PRIORITY` from 0; lower values are served first.
    priority: int = 0
    # Tenant with `--scheduling-policy fair`, and its share of the node relative to other tenants.
    tenant: str = ""
    weight: float = 1.0
    # Only requests with equal salts share cached prefixes, so that timings do not reveal other clients' prompts.
    cache_salt: str = ""
    # Required format of every answer, such as a JSON schema.
    constraint: Constraint | None = None
    # Return the prompt's embedding instead of generating.
    embed: bool = False
    # The client streams the answer. If False, tokens may be bundled, and an aborted request may lose its last tokens.
    streamed: bool = True
    # Seed used if `params` has none; part of the request, so that the same request always gets the same answers.
    random_seed: int = field(default_factory=partial(secrets.randbits, 63))

    # Answers to continue after a failure of the engine. None: a new request.
    resumed: Resumption | None = None

    @property
    def seed(self) -> int:
        """Seed of the first answer."""
        return self.random_seed if self.params.seed is None else self.params.seed

    @property
    def uses_prefix_cache(self) -> bool:
        """False for embeddings: they need the hidden states of every token, which the prefix cache does not hold."""
        return not self.embed
