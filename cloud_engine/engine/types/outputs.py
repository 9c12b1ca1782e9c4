"""What one step brought: an output where there is something to say, and bare tokens, in columns, where there is not."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .request import TokenOutput


class DecodedTokens(msgspec.Struct, frozen=True, gc=False):
    """One new token for each of many answers that go on. All lists are as long."""

    request_ids: list[str]
    indices: list[int]
    token_ids: list[int]


class StepOutputs(msgspec.Struct, frozen=True):
    """All outputs of a step, by iteration: those of `decoded` are made only then, in the face and not in the engine."""

    decoded: DecodedTokens = DecodedTokens([], [], [])
    others: list[TokenOutput] = []

    @property
    def are_news(self) -> bool:
        """Whether an answer begins or ends with them."""
        return any(output.cached_tokens is not None or output.finish_reason is not None for output in self.others)

    def __iter__(self) -> Iterator[TokenOutput]:
        decoded = self.decoded
        for request_id, index, token in zip(decoded.request_ids, decoded.indices, decoded.token_ids, strict=True):
            yield TokenOutput(request_id, [token], index=index)
        yield from self.others
