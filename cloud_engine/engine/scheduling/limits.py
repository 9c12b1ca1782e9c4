"""Limits of requests to an engine, checked before a request is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....protocol.errors import ContextLengthError, InvalidRequestError
from ..config import EngineConfig
from ..types.request import GenerationRequest
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on requests, set by the model and its server."""

    vocab_size: int
    context_length: int
    num_blocks: int
    config: EngineConfig

    def check(self, request: GenerationRequest, scheduler: Scheduler) -> None:
        """Check a request. Raises InvalidRequestError, or ContextLengthError if it does not fit even alone."""
        self._check_tokens("prompt", request.prompt_ids)
        self._check_tokens("prediction", request.draft_ids)
        if not request.prompt_ids:
            raise InvalidRequestError("The prompt has no tokens.", param="prompt", code="invalid_value")
        request.params.check_vocabulary(self.vocab_size)
        self._check_answers(request)
        if request.priority and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"The server uses --scheduling-policy {self.config.scheduling_policy}. Omit priority, or start it with "
                "--scheduling-policy priority.",
                param="priority",
            )
        self._check_length(request, scheduler)

    def _check_tokens(self, param: str, token_ids: Sequence[int]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            raise InvalidRequestError(
                f"Token ids must be between 0 and {self.vocab_size - 1}.", param=param, code="invalid_value"
            )

    def _check_answers(self, request: GenerationRequest) -> None:
        most = self.config.max_num_seqs
        if not 1 <= request.n <= most:
            raise InvalidRequestError(
                f"n and best_of must be between 1 and {most} (--max-num-seqs), got {request.n}.",
                param="n",
                code="invalid_value",
            )
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
        if prompt + new > scheduler.longest(self.context_length):
            raise ContextLengthError(
                f"The request needs more KV cache than the server has ({self.num_blocks} x "
                f"{self.config.block_size} tokens). Shorten the prompt or set a lower max_tokens.",
                param="prompt",
            )
