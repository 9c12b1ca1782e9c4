"""Verification: kernels against the reference, the reference against the engine's rule and the exact distribution."""

from __future__ import annotations

import math

import pytest
import torch
from updraft.cloud_engine.engine.output.output_processor import _agreement
from updraft.kernels.noise import gumbel_noise, noise_keys
from updraft.kernels.verification import (
    Chances,
    Drafts,
    reference_verify_by_rejection,
    reference_verify_coupled,
    verify_by_rejection,
    verify_coupled,
)
from updraft.kernels.vocabulary_launch import TILE
from updraft.protocol.errors import ConfigurationError

pytest.importorskip("triton")
from updraft.kernels.verification_triton import launch_verify_by_rejection, launch_verify_coupled

LENGTHS = [[3, 0, 1, 7, 2], [0, 0], [1], [], [8]]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(shape, *, dtype: torch.dtype, **options) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", filled)


def some_drafts(lengths: list[int], token_ids: torch.Tensor, longest: int | None = None) -> Drafts:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Drafts(token_ids, starts, max([0, *lengths]) if longest is None else longest)


def distributions(rows: int, vocabulary: int, seed: int, *, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale).softmax(-1)


def some_chances(lengths: list[int], vocabulary: int, *, has_draft: bool) -> tuple[Drafts, Chances]:
    total, sequences = sum(lengths), len(lengths)
    target, draft = distributions(total + sequences, vocabulary, 1), distributions(total, vocabulary, 2)
    token_ids = draft.argmax(-1) if total else torch.zeros(0, dtype=torch.int64)
    seeds, positions = torch.arange(total + sequences) // 3, torch.arange(total + sequences)
    chances = Chances(target, draft if has_draft else None, seeds, positions)
    for row in range(0, total, 2):  # every other draft is sure to be accepted
        rows_before = sum(row >= sum(lengths[: i + 1]) for i in range(sequences))
        target[row + rows_before] = 1e-9
        target[row + rows_before, token_ids[row]] = 1.0
    return some_drafts(lengths, token_ids, longest=max([0, *lengths]) + 1), chances


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_coupled_verification_is_the_engines_rule(lengths, monkeypatch) -> None:
    poison(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    total, sequences = sum(lengths), len(lengths)
    drafts = some_drafts(lengths, torch.randint(0, 2, (total,), generator=generator))
    sampled = torch.randint(0, 2, (total + sequences,), generator=generator)
    got = launch_verify_coupled(drafts, sampled)
    for verified in (got, verify_coupled(drafts, sampled), reference_verify_coupled(drafts, sampled)):
        start = 0
        for sequence, length in enumerate(lengths):
            own = sampled[start + sequence : start + sequence + length + 1].tolist()
            accepted = _agreement(drafts.token_ids[start : start + length].tolist(), own)
            assert int(verified.accepted[sequence]) == accepted
            padding = [-1] * (drafts.longest - accepted)
            assert verified.tokens[sequence].tolist() == own[: accepted + 1] + padding
            start += length
        assert verified.tokens.shape == (sequences, drafts.longest + 1)


@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("vocabulary", [5, TILE + 9])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rejection_kernels_are_the_reference(lengths, vocabulary, has_draft, monkeypatch) -> None:
    poison(monkeypatch)
    drafts, chances = some_chances(lengths, vocabulary, has_draft=has_draft)
    got, expected = launch_verify_by_rejection(drafts, chances), reference_verify_by_rejection(drafts, chances)
    assert torch.equal(got.accepted, expected.accepted)
    assert torch.equal(got.tokens, expected.tokens)
    behind = got.tokens.gather(1, got.accepted[:, None].long())
    assert (behind >= 0).all()


@pytest.mark.parametrize("has_draft", [True, False])
def test_the_output_has_the_targets_distribution(has_draft) -> None:
    """Chi-square over pairs of tokens: two drafts for each of many sequences, all with the same two models.

    As in the engine, the draft model samples with the noise of the very seeds and positions that verification uses.
    """
    draws, vocabulary = 20_000, 5
    p, q = distributions(3, vocabulary, 3, scale=1.5), distributions(2, vocabulary, 4, scale=1.5)
    seeds = torch.arange(draws).repeat_interleave(3)
    positions = torch.arange(3).repeat(draws)
    noise = gumbel_noise(noise_keys(seeds, positions), vocabulary).view(draws, 3, vocabulary)[:, :2]
    token_ids = (q.log() + noise).argmax(-1) if has_draft else torch.tensor([1, 2]).expand(draws, 2)
    drafts = Drafts(token_ids.flatten(), torch.arange(0, 2 * draws + 1, 2, dtype=torch.int32), 2)
    chances = Chances(p.repeat(draws, 1), q.repeat(draws, 1) if has_draft else None, seeds, positions)
    accepted, tokens = verify_by_rejection(drafts, chances)
    overlap = float(torch.minimum(p[0], q[0]).sum() if has_draft else p[0, 1])
    assert abs(float((accepted > 0).float().mean()) - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / draws)
    both = tokens[accepted >= 1]
    for row, column in ((p[0], tokens[:, 0]), (p[1], both[:, 1]), (p[2], tokens[accepted == 2][:, 2])):
        expected = row * len(column)
        observed = torch.bincount(column, minlength=vocabulary)
        statistic = float(((observed - expected) ** 2 / expected).sum())
        assert statistic < (vocabulary - 1) + 4 * math.sqrt(2 * (vocabulary - 1))


def test_equal_models_accept_everything() -> None:
    drafts, chances = some_chances([4, 4], 9, has_draft=True)
    same = Chances(chances.target, chances.target[[0, 1, 2, 3, 5, 6, 7, 8]], chances.seeds, chances.positions)
    for verify in (verify_by_rejection, launch_verify_by_rejection):
        accepted, tokens = verify(drafts, same)
        assert accepted.tolist() == [4, 4]
        assert tokens[:, :4].flatten().tolist() == drafts.token_ids.tolist()


def test_where_nothing_is_left_a_token_of_the_target_is_drawn() -> None:
    """A draft too likely in all that p has, by rounding alone: p - q leaves nothing."""
    target = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    draft = torch.tensor([[1e9, 0.5, 0.5]])
    drafts = some_drafts([1], torch.tensor([0]))
    chances = Chances(target, draft, torch.arange(2), torch.arange(2))
    for verify in (verify_by_rejection, launch_verify_by_rejection):
        accepted, tokens = verify(drafts, chances)
        assert accepted.tolist() == [0]
        assert tokens[0, 0] in (1, 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="int32 starts"):
        verify_coupled(Drafts(torch.zeros(1).long(), torch.tensor([0, 1]), 1), torch.zeros(2).long())
