"""Limits of requests to an engine, checked before a request is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....protocol.errors import ContextLengthError, InvalidRequestError
from ....protocol.sampling import PLAIN_SAMPLING
from ..config import EngineConfig
from ..types.request import GenerationRequest
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on requests, set by the model and its server."""

    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    num_blocks: int
    config: EngineConfig

    def check(self, request: GenerationRequest, scheduler: Scheduler) -> None:
        """Check a request. Raises InvalidRequestError, or ContextLengthError if it does not fit even alone."""
        self._check_tokens("prompt", request.prompt_ids)
        self._check_tokens("prediction", request.draft_ids)
        if not request.prompt_ids:
            raise InvalidRequestError("The prompt has no tokens.", param="prompt", code="invalid_value")
        request.params.check_vocabulary(self.vocab_size)
        self._check_branches(request)
        if request.priority and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"The server uses --scheduling-policy {self.config.scheduling_policy}. Omit priority, or start it with "
                "--scheduling-policy priority.",
                param="priority",
            )
        self._check_length(request, scheduler)

    def longest(self, request: GenerationRequest, scheduler: Scheduler) -> int:
        """Return the maximum number of prompt and answer tokens. The blocks of all beams must fit into the pool."""
        return scheduler.longest(self.context_length, request.beam.width if request.beam else 1)

    def _check_tokens(self, param: str, token_ids: Sequence[int]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            raise InvalidRequestError(
                f"Token ids must be between 0 and {self.vocab_size - 1}.", param=param, code="invalid_value"
            )

    def _check_branches(self, request: GenerationRequest) -> None:
        most = self.config.max_num_seqs
        if not 1 <= request.n <= request.num_branches <= most:
            raise InvalidRequestError(
                f"n, best_of and the number of beams must be between 1 and {most} (--max-num-seqs), and n must not "
                f"exceed the number of beams; got {max(request.n, request.num_branches)}.",
                param="n",
                code="invalid_value",
            )
        if request.beam:
            _check_beams(request, len(request.params.end_ids(self.eos_ids)), self.vocab_size)
        if request.embed and request.n != 1:
            raise InvalidRequestError("A prompt has only one embedding. Omit n.", param="n", code="invalid_value")

    def _check_length(self, request: GenerationRequest, scheduler: Scheduler) -> None:
        prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        new = 0 if request.embed else max_tokens or 1
        if prompt + new > self.context_length:
            raise ContextLengthError(
                f"The context is {self.context_length} tokens, but the prompt has {prompt} and the answer needs {new}. "
                f"Shorten the prompt{' or lower max_tokens' if new else ''}.",
                param="prompt",
            )
        if prompt + new > self.longest(request, scheduler):
            raise ContextLengthError(
                f"The request needs more KV cache than the server has ({self.num_blocks} x "
                f"{self.config.block_size} tokens). Shorten the prompt, set a lower max_tokens or use fewer beams.",
                param="prompt",
            )


def _check_beams(request: GenerationRequest, num_ends: int, vocab_size: int) -> None:
    """Refuse options that beam search lacks. `num_ends`: number of end tokens. Raises InvalidRequestError."""
    params = request.params.resolved(replace(PLAIN_SAMPLING, temperature=0.0))
    if request.num_branches + num_ends > vocab_size:
        raise InvalidRequestError("There are more beams than tokens in the vocabulary: use fewer beams.", param="n")
    if params.temperature or params.truncates or params.edits or request.constraint is not None:
        raise InvalidRequestError(
            "Beam search uses the model's raw probabilities: set temperature=0 and omit top_p, top_k, min_p, "
            "typical_p, penalties, logit_bias, min_tokens and output constraints.",
            param="use_beam_search",
            code="invalid_value",
        )
