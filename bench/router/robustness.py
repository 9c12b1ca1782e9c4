"""A learned router in use: decision time, and stability under noise in the question."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...classifier.arrays import Floats
from ...classifier.features.blocks import Mode, view_of
from ...classifier.features.feature_rows import featurise
from ...classifier.features.gate_inputs import PromptView
from ...classifier.graded_row import GradedRow
from ...classifier.optional_imports import load_onnxruntime
from ...classifier.policy.exported_gates import ExportedGates, Graphs
from ...classifier.training.export import gate_to_onnx, topics_to_onnx
from ...classifier.training.router_model import RouterModel
from ...protocol.requests import Message
from ...protocol.safety.system import python_command
from ..shared.statistics import percentile

_CHARS = 2_000
_TOKEN = 4  # characters per piece of a streamed answer
_DECISIONS = 1_000
_NOISY_ROWS = 200
_SHARES = (0.2, 0.5, 0.8)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def robustness(router: RouterModel, rows: Sequence[GradedRow], mode: Mode) -> dict[str, Any]:
    """Return decision time, the exported router's error, and the share of decisions that noise leaves unchanged."""
    some = rows[:: max(1, len(rows) // _NOISY_ROWS)][:_NOISY_ROWS]
    gates = _exported(router, rows, mode)
    fitted = router.probability(featurise(some, mode))
    exported = np.array([_decide(gates, row, mode) for row in some])
    return {
        "decision_ms": _decision_ms(gates, rows, mode),
        "export_gap": float(np.abs(fitted - exported).max()),
        "unchanged": unchanged(router, rows, mode),
        "paraphrase_flips": paraphrase_flips(router, rows[0]) if mode == "prompt" else {},
    }


def paraphrase_flips(router: RouterModel, like: GradedRow) -> dict[str, float]:
    """Return the share of decisions that change if a question is paraphrased, at thresholds that escalate 20, 50 and 80
    % of such questions. `like`: a row of the kind that `router` was fitted on.
    """
    pairs = paraphrases()
    one, other = (
        router.probability(featurise([_with_question(like, pair[form]) for pair in pairs], "prompt")) for form in (0, 1)
    )
    thresholds = {share: _threshold_at(one, share) for share in _SHARES}
    return {f"at_{share:g}": float(np.mean((one > t) != (other > t))) for share, t in thresholds.items()}


def unchanged(router: RouterModel, rows: Sequence[GradedRow], mode: Mode) -> dict[str, float]:
    """Return the share of decisions that each noise leaves unchanged, over thresholds that escalate 20, 50 and 80 %."""
    some = rows[:: max(1, len(rows) // _NOISY_ROWS)][:_NOISY_ROWS]
    usual = router.probability(featurise(rows, mode))
    thresholds = [_threshold_at(usual, share) for share in _SHARES]
    prompts = [row.prompt for row in some]

    def judged(noisy: Sequence[str]) -> Floats:
        return router.probability(featurise(list(map(_with_question, some, noisy)), mode))

    shares = unchanged_by_noise(judged, prompts, thresholds)
    return shares | {"least": min(shares.values())}


def unchanged_by_noise(
    judged: Callable[[Sequence[str]], Floats], prompts: Sequence[str], thresholds: Sequence[float]
) -> dict[str, float]:
    """Return the share of decisions that each noise leaves unchanged. `judged`: P(gain) by prompt."""
    before, rng = judged(prompts), np.random.default_rng(0)
    shares: dict[str, float] = {}
    for name, noise in NOISES.items():
        after = judged([noise(prompt, rng) for prompt in prompts])
        shares[name] = float(np.mean([(before > t) == (after > t) for t in thresholds]))
    return shares


def _threshold_at(p_gain: Floats, share: float) -> float:
    """Return the threshold that `share` of the scores exceed."""
    return float(np.quantile(p_gain, 1 - share))


def _with_question(row: GradedRow, prompt: str) -> GradedRow:
    """Return a copy of the row whose last question is `prompt`."""
    if row.messages is None:
        return replace(row, prompt=prompt)
    return replace(row, prompt=prompt, messages=(*row.messages[:-1], Message(role="user", content=prompt)))


def _typo(text: str, rng: np.random.Generator) -> str:
    """Make one typo inside a word: swap two letters, or drop, double or replace one letter."""
    places = [i for i in range(len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    at = int(rng.choice(places))
    letter = _LETTERS[int(rng.integers(len(_LETTERS)))]
    slips = (text[at + 1] + text[at], text[at + 1], text[at] + text[at : at + 2], letter + text[at + 1])
    return text[:at] + slips[int(rng.integers(len(slips)))] + text[at + 2 :]


def _casing(text: str, rng: np.random.Generator) -> str:
    return (text.lower(), text.upper(), text.title(), text.swapcase())[int(rng.integers(4))]


def _blanks(text: str, rng: np.random.Generator) -> str:
    """Return the text with double or no-break spaces, a tab, blanks at both ends, or line breaks at the end."""
    doubled, unbroken = text.replace(" ", "  "), text.replace(" ", "\u00a0")
    forms = (doubled, unbroken, text.replace(" ", "\t", 1), f"  {text} ", f"{text}\n\n")
    return forms[int(rng.integers(len(forms)))]


def _widths(text: str, _: np.random.Generator) -> str:
    """Return the text with ASCII in full-width forms."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


NOISES: dict[str, Callable[[str, np.random.Generator], str]] = {
    "typo": _typo,
    "casing": _casing,
    "blanks": _blanks,
    "widths": _widths,
}


def _exported(router: RouterModel, rows: Sequence[GradedRow], mode: Mode) -> ExportedGates:
    """Export the router's gate to ONNX, the form in which a policy runs gates."""
    onnxruntime = load_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    widths = featurise(rows[:1], mode).widths
    graphs = topics_to_onnx(router.topics), gate_to_onnx(router, sum(widths.values()))
    topics, gate = (
        onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"]) for graph in graphs
    )
    return ExportedGates(Graphs(topics, {mode: gate}), {mode: widths})


def _decide(gates: ExportedGates, row: GradedRow, mode: Mode) -> float:
    return gates.after(view_of(row)) if mode == "cascade" else gates.before(PromptView(row.prompt))


def _decision_ms(gates: ExportedGates, rows: Sequence[GradedRow], mode: Mode) -> dict[str, float | None]:
    """Time features and model together on prompts of 2,000 characters, which are joined from the file's prompts.

    In a cascade, gate 3 is timed from the end of the answer. By then, the question and all lines of the answer but the
    last are parsed. `cpu_`: processor time, which excludes the time of other processes.
    """
    prompts = long_prompts([row.prompt for row in rows[:200]])

    def prepared(i: int) -> Callable[[], object]:
        row = replace(rows[i % len(rows)], prompt=prompts[i % len(prompts)])
        gates.read_ahead(PromptView(row.prompt))
        text = row.answer or ""
        for end in range(_TOKEN, len(text), _TOKEN):
            gates.read_lines(text[:end])
        return lambda: _decide(gates, row, mode)

    return timed(prepared)


def long_prompts(prompts: Sequence[str]) -> list[str]:
    """Return prompts of 2,000 characters, cut from the given prompts joined together."""
    text = "\n".join(prompts)
    starts = range(0, max(1, len(text) - _CHARS), 97)
    return [(text[start:] * (1 + _CHARS // max(1, len(text) - start)))[:_CHARS] for start in starts]


def timed(prepared: Callable[[int], Callable[[], object]]) -> dict[str, float | None]:
    """Return percentiles of decision times in milliseconds. The first 100 of 1,000 decisions warm up.

    `prepared(i)` does the work ahead of decision i and returns a function that decides. Keys with `cpu_` are
    processor times of this process.
    """
    taken: Floats = np.zeros((2, _DECISIONS))
    for i in range(_DECISIONS):
        decide = prepared(i)
        started = time.perf_counter_ns(), time.thread_time_ns()
        decide()
        taken[:, i] = time.perf_counter_ns() - started[0], time.thread_time_ns() - started[1]
    parts = zip(("", "cpu_"), (1e-6 * taken[:, _DECISIONS // 10 :]).tolist(), strict=True)
    return {f"{part}{name}": percentile(ms, q) for part, ms in parts for name, q in (("p50", 50), ("p99", 99))}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each use a full core, while the block runs."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(python_command("-c", "while True: pass")))
            stack.callback(process.kill)
        yield


def paraphrases(per_intent: int = 10, seed: int = 0) -> list[tuple[str, str]]:
    """Return about a hundred pairs of paraphrases, at most `per_intent` per paragraph. Deterministic for a seed.

    A paragraph of `paraphrases.txt` has several wordings of a question, one per line, in which @ is a placeholder. Its
    last line lists words for the placeholder. A pair is two wordings with the same word.
    """
    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    for intent in Path(__file__).with_name("paraphrases.txt").read_text(encoding="utf-8").split("\n\n"):
        *forms, last = intent.strip().splitlines()
        things = last.split("; ")
        for thing in rng.sample(things, min(per_intent, len(things))):
            one, other = rng.sample(forms, 2)
            pairs.append((one.replace("@", thing), other.replace("@", thing)))
    return pairs
