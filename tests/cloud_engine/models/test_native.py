"""All layers in one call of C: the same bits as one kernel after the other, for every family."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from updraft.cloud_engine.engine.runner import Chunk, Runner
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.loader import load_model
from updraft.kernels.attention import QuerySpan
from updraft.kernels.native_library import load
from updraft.kernels.ragged_batch import RaggedBatch
from updraft.protocol.errors import ConfigurationError

sys.path.insert(0, str(Path(__file__).parent))
from reference import SHAPES, random_tokens, reference_model

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(load() is None, reason="no C compiler")
BLOCK = 16
#: (already computed, known) of each sequence
LENGTHS = [(0, 40), (16, 30), (31, 32), (60, 61), (47, 52), (5, 6), (15, 17)]


def saved(folder: Path, shape: str, **others: Any) -> Path:
    architecture, options = SHAPES[shape]
    reference_model(architecture, **{**options, **others}).save_pretrained(folder)
    return folder


def fused_logits(model: Decoder) -> list[torch.Tensor]:
    """In one call of C; skips where that cannot be."""
    runner = Runner(model, 64, BLOCK)
    if model._native is None or runner.attention_backend != "native":  # type: ignore[attr-defined]
        pytest.skip("not all of this is C on this processor")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.layers[0], "forward", None)  # nobody calls it
        return logits_of(runner)


def apart_logits(model: Decoder) -> list[torch.Tensor]:
    """One kernel after the other."""
    runner = Runner(model, 64, BLOCK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "_native", None)
        return logits_of(runner)


def logits_of(runner: Runner) -> list[torch.Tensor]:
    """Prefills, chunks, decodes and drafts together, then decodes alone."""
    tables = [[7 * seed + block for block in range(7)] for seed in range(len(LENGTHS))]
    tokens = [random_tokens(known, seed) for seed, (_, known) in enumerate(LENGTHS)]
    first = [
        Chunk(tokens[seed][:computed], 0, tables[seed], 0) for seed, (computed, _) in enumerate(LENGTHS) if computed
    ]
    rest = [
        Chunk(tokens[seed][computed:], computed, tables[seed], known - computed)
        for seed, (computed, known) in enumerate(LENGTHS)
    ]
    found = [runner.run(first), runner.run(rest)]
    for seed, (_, known) in enumerate(LENGTHS):
        found.append(runner.run([Chunk([int(found[1][seed].argmax())], known, tables[seed], 1)]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_one_kernel_after_the_other(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, shape), dtype=dtype)
    for one, other in zip(fused_logits(model), apart_logits(model), strict=True):
        assert torch.equal(one, other)


def test_rows_whose_columns_would_compete_for_a_cache_line(tmp_path: Path) -> None:
    """512 float32 are 2,048 bytes: such rows are moved apart, with one thread and with two."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024}
    model = load_model(saved(tmp_path, next(iter(SHAPES)), **sizes))
    fused = fused_logits(model)
    torch.set_num_threads(2)
    try:
        threaded = fused_logits(model)
    finally:
        torch.set_num_threads(1)
    for one, two, three in zip(fused, threaded, apart_logits(model), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_what_does_not_fit_is_refused_before_c_reads_it(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, next(iter(SHAPES))))
    runner = Runner(model, 4, BLOCK)
    if not model.fuse():
        pytest.skip("another form of linear layers is faster on this processor")
    begin = runner._backend.begin  # type: ignore[attr-defined]
    batch = RaggedBatch.of([QuerySpan(0, 3, [0])], 3, BLOCK)
    for tokens, positions, problem in [
        (torch.zeros(3, dtype=torch.int64), torch.arange(4), "of one shape"),
        (torch.zeros(4, dtype=torch.int64), torch.arange(4), "do not fit the batch"),
    ]:
        with pytest.raises(ConfigurationError, match=problem):
            model(tokens, positions, begin(batch))
    model.embed_tokens.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match="bfloat16"):
        model(torch.zeros(3, dtype=torch.int64), torch.arange(3), begin(batch))
