"""All layers in one call of C: the same bits as one kernel after the other, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_reference import EXPERT_SHAPES, SHAPES, random_tokens, reference_model
from forward_chunks import Chunk, compute
from plain_sampling import SamplingRow, sample, sampling_rows
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.compile import compile_decoder
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.layers import TokenEmbedding
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.models.sharding import Shard
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan
from updraft.kernels.linear.cpu import NativeLinear
from updraft.kernels.linear.ops import pack_linear
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import ResolvedParams

torch.set_num_threads(1)
BLOCK = 16
#: (already computed, known) of each sequence
LENGTHS = [(0, 40), (16, 30), (31, 32), (60, 61), (47, 52), (5, 6), (15, 17)]


#: Heads of 24 have no attention in C, and norms over all heads and experts no place in it.
NOT_IN_C = ("llama-mqa-wide-head", "olmo2", *EXPERT_SHAPES)
IN_C = [shape for shape in SHAPES if shape not in NOT_IN_C]
#: Types whose layers are in C on this processor: oneDNN multiplies bfloat16 faster with a matrix unit.
DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if isinstance(pack_linear(torch.nn.Linear(32, 32, dtype=dtype)), NativeLinear)
]
OTHER_DTYPES = {torch.float32, torch.bfloat16}.difference(DTYPES)
pytestmark = pytest.mark.skipif(torch.float32 not in DTYPES, reason="no C compiler, or oneDNN is always faster here")


def saved(folder: Path, shape: str, **others: Any) -> Path:
    architecture, options = SHAPES[shape]
    reference_model(architecture, **{**options, **others}).save_pretrained(folder)
    return folder


def fused_logits(model: Decoder) -> list[torch.Tensor]:
    """In one call of C."""
    runner = Runner(model, 64, BLOCK)
    assert runner._compiled is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.layers[0], "forward", None)  # nobody calls it
        return logits_of(runner)


def apart_logits(model: Decoder) -> list[torch.Tensor]:
    """One kernel after the other."""
    runner = Runner(model, 64, BLOCK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "_compiled", None)
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
    logits = [compute(runner, first), compute(runner, rest)]
    for seed, (_, known) in enumerate(LENGTHS):
        logits.append(compute(runner, [Chunk([int(logits[1][seed].argmax())], known, tables[seed], 1)]))
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", IN_C)
def test_the_same_bits_as_one_kernel_after_the_other(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, shape), dtype=dtype)
    for one, other in zip(fused_logits(model), apart_logits(model), strict=True):
        assert torch.equal(one, other)


def rows_of(starts: Sequence[int]) -> list[SamplingRow]:
    """Greedy and drawn, truncated in every way that C knows, and not."""
    kinds: list[tuple[float, dict[str, Any]]] = [
        (0.0, {}),
        (0.8, {}),
        (1.0, {"top_k": 5}),
        (0.7, {"top_p": 0.8}),
        (1.3, {"min_p": 0.1}),
    ]
    rows: list[SamplingRow] = []
    for index, start in enumerate(starts):
        temperature, options = kinds[index % len(kinds)]
        rows.append(SamplingRow(7 + index, start + 1, ResolvedParams(temperature=temperature, **options)))
    return rows


def extended(runner: Runner, first: list[int], spans: list[QuerySpan], rows: list[SamplingRow]) -> list[list[int]]:
    batch = RaggedBatch.of(spans, sum(span.length for span in spans), BLOCK)
    return runner.extend(first, batch, sampling_rows(rows))


def one_by_one(runner: Runner, first: list[int], spans: list[QuerySpan], rows: list[SamplingRow]) -> list[list[int]]:
    """A structure for `Runner.extend` to find."""
    continued: list[list[int]] = [[] for _ in spans]
    tokens = list(first)
    for index in range(spans[0].length):
        live = [at for at, span in enumerate(spans) if span.length > index]
        chunks = [Chunk([tokens[at]], spans[at].start + index, spans[at].block_table, 1) for at in live]
        later = [rows[at]._replace(position=rows[at].position + index) for at in live]
        chosen = sample(compute(runner, chunks), later)
        for at, token in zip(live, chosen, strict=True):
            tokens[at] = token
            continued[at].append(token)
    return continued


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in NOT_IN_C), *((next(iter(SHAPES)), each) for each in OTHER_DTYPES)],
)
def test_other_models_run_one_kernel_after_the_other(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    runner = Runner(load_model(saved(tmp_path, shape), dtype=dtype), 64, BLOCK)
    assert not runner.can_extend
    assert runner.attention_backend != "native" or compile_decoder(runner.model) is None
    assert all(logits.isfinite().all() for logits in logits_of(runner))


def test_capped_logits_have_no_continuation(tmp_path: Path) -> None:
    runner = Runner(load_model(saved(tmp_path, "gemma3-scaled")), 64, BLOCK)
    assert runner._compiled is not None
    assert not runner.can_extend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in IN_C if "final_logit_softcapping" not in SHAPES[shape][1]])
def test_a_continuation_chooses_what_single_passes_do(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Sequences of different lengths cross block borders, and the cache is the same afterwards."""
    model = load_model(saved(tmp_path, shape), dtype=dtype)
    runners = [Runner(model, 64, BLOCK) for _ in range(2)]
    assert runners[0].can_extend
    known, lengths = [40, 15, 61, 3, 30, 31, 9], [20, 18, 9, 9, 5, 1, 1]
    tables = [[7 * seed + block for block in range(7)] for seed in range(len(known))]
    for runner in runners:
        compute(runner, [Chunk(random_tokens(n, seed), 0, tables[seed], 1) for seed, n in enumerate(known)])
    spans = [QuerySpan(start, length, table) for start, length, table in zip(known, lengths, tables, strict=True)]
    first, rows = random_tokens(len(known), 99), rows_of(known)
    continued = extended(runners[0], first, spans, rows)
    assert continued == one_by_one(runners[1], first, spans, rows)
    assert [len(tokens) for tokens in continued] == lengths
    behind = [
        Chunk([tokens[-1]], start + length, table, 1)
        for tokens, start, length, table in zip(continued, known, lengths, tables, strict=True)
    ]
    assert torch.equal(compute(runners[0], behind), compute(runners[1], behind))


def test_a_continuation_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    runner = Runner(load_model(saved(tmp_path, next(iter(SHAPES)))), 8, BLOCK)
    assert runner.can_extend
    vocabulary = runner.model.config.vocab_size
    row, span = rows_of([0])[0], QuerySpan(0, 2, [0])
    typical = SamplingRow(1, 1, ResolvedParams(typical_p=0.5))
    cases: list[tuple[list[int], list[QuerySpan], list[SamplingRow], str]] = [
        ([vocabulary], [span], [row], "token ids below"),
        ([-1], [span], [row], "token ids below"),
        ([1, 2], [span], [row], "needs 1 token ids"),
        ([1], [span], [row, row], "temperatures"),
        ([1], [span], [typical], "typical-p"),
        ([1, 2], [span, QuerySpan(0, 3, [1])], [row, row], "start with the longest"),
        ([1], [QuerySpan(0, 0, [0])], [row], "start with the longest"),
        ([], [], [], "start with the longest"),
    ]
    for first, spans, rows, problem in cases:
        with pytest.raises(ConfigurationError, match=problem):
            extended(runner, first, spans, rows)


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


def test_wrong_shapes_are_refused_before_the_c_call(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, next(iter(SHAPES))))
    runner = Runner(model, 4, BLOCK)
    compiled = compile_decoder(model)
    assert compiled is not None
    begin = runner._backend.begin  # type: ignore[attr-defined]
    batch = RaggedBatch.of([QuerySpan(0, 3, [0])], 3, BLOCK)
    for tokens, positions, problem in [
        (torch.zeros(3, dtype=torch.int64), torch.arange(4), "of the same shape"),
        (torch.zeros(4, dtype=torch.int64), torch.arange(4), "do not fit the batch"),
    ]:
        with pytest.raises(ConfigurationError, match=problem):
            compiled(tokens, positions, begin(batch))
    model.embed_tokens = TokenEmbedding(model.config.hidden_size, Shard(0, (model.config.vocab_size,))).to(
        torch.bfloat16
    )
    with pytest.raises(ConfigurationError, match="bfloat16"):
        compiled(torch.zeros(3, dtype=torch.int64), torch.arange(3), begin(batch))
