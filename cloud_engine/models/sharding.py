"""The part of a model that a rank holds, and the ranks' group: tensor parallelism (Shoeybi et al. 2019) and stages.

The first matrix of attention and of the feed-forward layer is split by outputs, the second by inputs. So each layer
needs two sums over the ranks of its stage. Vocabulary matrices are split by tokens. Stages have consecutive layers
(pipeline parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError


class ModelGroup:
    """The ranks that compute one model together, as seen by rank `rank` of `stage`. This class is a group of one.

    `size` ranks share each layer, in each of `num_stages` stages.
    """

    rank = 0
    size = 1
    stage = 0
    num_stages = 1
    #: Whether ranks hold whole experts, instead of parts of all experts.
    expert_parallel = False

    @property
    def is_alone(self) -> bool:
        return self.size == self.num_stages == 1

    @property
    def is_first(self) -> bool:
        """Return whether this rank's stage begins with the embeddings."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether this rank's stage ends with the logits."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this rank's stage."""
        return range(self.stage * num_layers // self.num_stages, (self.stage + 1) * num_layers // self.num_stages)

    def hand_on(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        raise NotImplementedError

    def take_over(self, into: Tensor) -> Tensor:
        """Receive the hidden states of the stage before into a tensor of their shape, and return it."""
        raise NotImplementedError

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of the stage's tensors of one shape. May overwrite `partial`."""
        return partial

    def join(self, part: Tensor) -> Tensor:
        """Concatenate the stage's tensors of one shape along the last dimension."""
        return part

    def tell(self, message: object) -> None:
        """Send a message to the ranks that follow this one, if there are any."""

    def share(self, units: int) -> range:
        """Return the units that this rank holds. If there are fewer units than ranks, several ranks hold each unit."""
        if units < self.size:
            first = self.rank * units // self.size
            return range(first, first + 1)
        most = -(-units // self.size)
        return range(min(self.rank * most, units), min((self.rank + 1) * most, units))


ALONE = ModelGroup()


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a weight matrix. It has a share of each section of one dimension."""

    # 0: outputs are split, including the bias. 1: inputs are split, so the ranks' outputs must be summed.
    dim: int
    # Units of each section: heads, neurons or tokens.
    sections: tuple[int, ...]
    # Rows or columns per unit.
    unit: int = 1
    group: ModelGroup = field(default=ALONE, compare=False)

    @property
    def length(self) -> int:
        """Length of the split dimension on this rank."""
        return self.unit * sum(len(self.group.share(units)) for units in self.sections)

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole matrix (outputs, inputs) or bias (outputs,)."""
        if self.group.size == 1:
            return whole
        if whole.dim() <= self.dim:  # a bias that is added once
            return whole if self.group.rank == 0 else torch.zeros_like(whole)
        pieces: list[Tensor] = []
        for section, units in zip(
            whole.split([units * self.unit for units in self.sections], self.dim), self.sections, strict=True
        ):
            share = self.group.share(units)
            pieces.append(section.narrow(self.dim, share.start * self.unit, len(share) * self.unit))
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """A rank's part of stacked experts (experts, ...): some whole experts, or a part of each expert."""

    # The experts that the rank holds.
    experts: range
    # Part of each of these experts' matrices.
    matrix: Shard

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of stacked matrices or biases."""
        own = whole[self.experts.start : self.experts.stop]
        return own if self.matrix.group.size == 1 else torch.stack([self.matrix.take(each) for each in own])


def check_divisible(group: ModelGroup, num_layers: int, sizes: dict[str, int], kv_heads: int) -> None:
    """Raise ConfigurationError if a stage has no layers, or ranks no equal shares of `sizes` and of the KV heads."""
    if group.num_stages > num_layers:
        fault = f"pipeline_parallel: {group.num_stages} stages are too many for the {num_layers} layers of this model."
        raise ConfigurationError(fault, param="pipeline_parallel")
    uneven = [f"{count} {name}" for name, count in sizes.items() if count % group.size]
    if max(kv_heads, group.size) % min(kv_heads, group.size):
        uneven.append(f"{kv_heads} KV heads")
    if uneven:
        raise ConfigurationError(
            f"tensor_parallel: {group.size} ranks cannot share {' and '.join(uneven)} of this model equally.",
            param="tensor_parallel",
        )
