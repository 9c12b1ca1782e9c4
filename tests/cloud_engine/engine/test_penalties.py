"""Penalties in the engine: every row that is sampled is edited for just the tokens before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plain_sampling import plain_edits
from updraft.cloud_engine.engine.worker.slots import SlotState

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2, "min_tokens": 5}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "config", [{}, {"block_size": 4, "num_gpu_blocks_override": 48, "max_num_batched_tokens": 24}], ids=["", "tight"]
)
def test_edits_are_those_of_the_tokens_before(
    make_engine: Any, make_prompts: Any, ask: Any, run: Any, draft: Any, monkeypatch: Any, config: Any, temperature: Any
) -> None:
    """With drafts of all kinds, several answers, and (where it is tight) preemptions."""
    edited: list[tuple[int, int]] = []
    plain = SlotState.edits

    def checked(self: SlotState, draft_ids: Any) -> Any:
        edits, sequence = plain(self, draft_ids), self.sequence
        known, number = self.token_ids.tolist(), sequence.num_prompt_tokens
        prompt, answer = known[:number], known[number:]
        wanted = plain_edits(sequence.params, prompt, answer + list(draft_ids), sequence.end_ids)
        assert edits is not None and wanted is not None
        logits = np.random.default_rng(0).standard_normal(97).astype(np.float32)
        np.testing.assert_array_equal(edits.applied(logits), wanted.applied(logits))
        edited.append((sequence.seed - 4, len(draft_ids)))
        return edits

    monkeypatch.setattr(SlotState, "edits", checked)
    engine = make_engine(draft=draft, ngram=True, eos=(3,), draft_length="fixed", **config)
    prompts = make_prompts(8)
    drafts = [[*prompt, *prompt][:20] for prompt in prompts]
    requests = ask(prompts, drafts=drafts, n=2, temperature=temperature, seed=4, ignore_eos=False, **PENALTIES)
    assert all(result.finish_reason for result in run(engine, requests))
    assert {index for index, _ in edited} == {0, 1}
    assert max(behind for _, behind in edited) > 1
    assert bool(engine.stats().preemptions) == bool(config)
