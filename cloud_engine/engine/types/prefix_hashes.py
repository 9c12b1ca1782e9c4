"""Hashes of a request's full blocks, the keys of the prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class UnhashedBlocks:
    """Blocks of `token_ids`, except the first, registered in the pool under placeholder `keys` instead of hashes."""

    token_ids: Sequence[int]
    keys: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class PrefixHashes:
    """Lazily computed hashes of a request's full blocks. Each hash covers the previous hash and the block's tokens.

    Equal hashes (BLAKE2b) mean equal prefixes and salts. `unhashed` holds the blocks without hashes while no other
    request shares the first block.
    """

    salt: str
    hashes: list[bytes] = field(default_factory=list[bytes])
    unhashed: UnhashedBlocks | None = None

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Hash the first `num_blocks` blocks of `token_ids`, except blocks that already have a hash."""
        tokens = array("I", token_ids[len(self.hashes) * block_size : num_blocks * block_size])
        parent = self.hashes[-1] if self.hashes else self.salt.encode()
        data, width = tokens.tobytes(), block_size * tokens.itemsize
        for start in range(0, len(data), width):
            parent = hashlib.blake2b(parent + data[start : start + width], digest_size=32).digest()
            self.hashes.append(parent)
