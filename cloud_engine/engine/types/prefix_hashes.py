"""The hashes of a request's full blocks, by which the prefix cache finds them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Unhashed:
    """The blocks of `token_ids` behind the first one, in the pool under `keys` that stand in for their hashes."""

    token_ids: Sequence[int]
    keys: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class PrefixHashes:
    """The hashes of a request's full blocks, as far as anybody needed them, chained: the parent's hash and the tokens.

    Equal hashes (BLAKE2b) mean equal prefixes and salts. `unhashed`: what has no hashes yet, while the request is
    alone.
    """

    salt: str
    hashes: list[bytes] = field(default_factory=list[bytes])
    unhashed: Unhashed | None = None

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Hash the first `num_blocks` blocks of `token_ids`, so far as that is not done."""
        tokens = array("I", token_ids[len(self.hashes) * block_size : num_blocks * block_size])
        parent = self.hashes[-1] if self.hashes else self.salt.encode()
        data, width = tokens.tobytes(), block_size * tokens.itemsize
        for start in range(0, len(data), width):
            parent = hashlib.blake2b(parent + data[start : start + width], digest_size=32).digest()
            self.hashes.append(parent)
