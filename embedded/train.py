"""Trains the pocket models: `python -m updraft.embedded.train --model small --out out/small`.

One command per model, deterministic by seed, resumable, on CPU or CUDA. Batch number i is a pure function of (seed, i),
so a resumed run gets the same batches as an uninterrupted one, and both models see the same stream.
"""

# ruff: noqa: T201 - the script prints for a person

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from .collect import cloud_answers
from .export import write_hf_folder
from .model import ModelShape, PocketLlama
from .tasks import Task, check, make_tasks, stream
from .tokenizer import IM_END, PAD, VOCAB_SIZE, chat_text, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 512
# Most batches hold rows of 192 tokens in which tasks do not see each other, like single requests. Every eighth batch
# has full-length rows in which tasks see the tasks before them, like conversations.
_SHORT, _LONG_EVERY = 192, 8
_ANSWER = 1 << 15
_SAVE_EVERY_S = 120.0
Optimizers = list[torch.optim.Optimizer]
# The models should learn answers; a small weight on questions lets the router notice unusual questions.
_QUESTION_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Size and schedule of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    learning_rate: float  # learning rate between warm-up and decay
    steps: int
    tokens: int = 4096  # tokens per batch
    warmup: int = 100  # warm-up steps
    decay: float = 0.3  # share of steps with learning-rate decay
    weight_decay: float = 0.02
    seed: int = 1


_STEPS = 6_500  # training steps from random weights; equal for both models, so that only their size differs
RECIPES = {
    "small": TrainingRecipe(
        hidden=64, layers=2, heads=2, kv_heads=1, feed_forward=128, learning_rate=5e-3, steps=_STEPS
    ),
    "large": TrainingRecipe(
        hidden=192, layers=4, heads=6, kv_heads=2, feed_forward=512, learning_rate=3e-3, steps=_STEPS
    ),
}


@dataclass(frozen=True, slots=True)
class TrainingMachine:
    """Compute resources of a run: torch device, processes that prepare batches, whether to compile the model."""

    device: str
    workers: int
    compile: bool


class Batches(torch.utils.data.Dataset[tuple[np.ndarray, np.ndarray]]):
    """Training batches: int32 token ids (rows, length + 1), in which bit 15 marks answer tokens, and each token's
    segment number (rows, length). Tasks are packed whole and never cut.
    """

    def __init__(self, tokenizer: Tokenizer, recipe: TrainingRecipe) -> None:
        self._tokenizer, self._recipe = tokenizer, recipe
        self._pad = _id(tokenizer, PAD)

    def __len__(self) -> int:
        return self._recipe.steps

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        is_short = index % _LONG_EVERY != _LONG_EVERY - 1
        length = _SHORT if is_short else CONTEXT
        rows = np.full((self._recipe.tokens // length, length + 1), self._pad, np.int32)
        segments = np.zeros((len(rows), length), np.int32)
        filled = [0] * len(rows)
        tasks = self._draw(index, length + 1, rows.size)
        if is_short:
            tasks.sort(key=len, reverse=True)  # placing the shortest tasks last leaves little padding
        for number, tokens in enumerate(tasks, 1):
            row = next((r for r, used in enumerate(filled) if used + len(tokens) <= length + 1), None)
            if row is None:
                continue
            start, filled[row] = filled[row], filled[row] + len(tokens)
            rows[row, start : filled[row]] = tokens
            if is_short:
                segments[row, start : filled[row]] = number
        return rows, segments

    def _draw(self, index: int, longest: int, num_tokens: int) -> list[np.ndarray]:
        """Return tasks of batch `index` that fill `num_tokens` tokens, each at most `longest` tokens long."""
        tasks = stream("train", self._recipe.seed * 1_000_003 + index)
        chosen: list[np.ndarray] = []
        while num_tokens > 0:
            fitting = [tokens for tokens in self._encode(list(islice(tasks, 32))) if len(tokens) <= longest]
            for tokens in fitting:
                num_tokens -= len(tokens)
                if num_tokens >= 0:
                    chosen.append(tokens)
        return chosen

    def _encode(self, tasks: list[Task]) -> list[np.ndarray]:
        questions = self._tokenizer.encode_batch_fast([chat_text(t.prompt) for t in tasks], add_special_tokens=False)
        answers = self._tokenizer.encode_batch_fast([f"{t.answer}{IM_END}\n" for t in tasks], add_special_tokens=False)
        return [
            np.array([*q.ids, *(i | _ANSWER for i in a.ids)], np.int32) for q, a in zip(questions, answers, strict=True)
        ]


def build_model(recipe: TrainingRecipe) -> PocketLlama:
    """Return a randomly initialized model of the recipe's size."""
    torch.manual_seed(recipe.seed)
    sizes = (recipe.hidden, recipe.layers, recipe.heads, recipe.kv_heads, recipe.feed_forward)
    return PocketLlama(ModelShape(VOCAB_SIZE, *sizes))


def load_weights(model: PocketLlama, folder: Path) -> dict[str, Any]:
    """Load the weights in an exported folder into `model`. Return their origin for the report: digest, commit, recipe.

    Raises SystemExit if the folder has no model, or a model of another size.
    """
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    try:
        model.load_state_dict(load_file(file))
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"--start-from needs a folder with a model of the recipe's size: {error}") from None
    report = next((r for r in (folder / "training.json", folder.parent / "report.json") if r.exists()), None)
    earlier: dict[str, Any] = json.loads(report.read_text()) if report else {}
    known = {name: earlier[name] for name in ("recipe", "started_from") if name in earlier}
    return {"weights_sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "commit": _commit(), **known}


def _commit() -> str:
    """Return the commit of this checkout; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def model_config(recipe: TrainingRecipe) -> dict[str, Any]:
    """Return the content of config.json for the exported model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.feed_forward,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.hidden // recipe.heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def batch_loss(model: torch.nn.Module, rows: torch.Tensor, segments: torch.Tensor, pad: int) -> torch.Tensor:
    """Return the weighted next-token cross-entropy of rows (batch, length + 1), int64 with bit 15 marking answers.

    The first token of a segment is not predicted, because another text precedes it in the row.
    """
    tokens = rows & (_ANSWER - 1)
    weights = torch.where(rows[:, 1:] >= _ANSWER, 1.0, _QUESTION_WEIGHT) * (tokens[:, 1:] != pad)
    weights[:, :-1] *= segments[:, 1:] == segments[:, :-1]
    logits = model(tokens[:, :-1], segments).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def schedule(recipe: TrainingRecipe, step: int) -> float:
    """Return the learning-rate factor: warm-up, plateau, then linear decay over the last `decay` of the steps."""
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / (recipe.decay * recipe.steps))


def build_optimizers(recipe: TrainingRecipe, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(recipe: TrainingRecipe, out: Path, machine: TrainingMachine, model: PocketLlama) -> PocketLlama:
    """Train `model` to the end of the recipe, resuming from `out/checkpoint.pt` if it exists."""
    tokenizer = load_tokenizer()
    model = model.to(machine.device)
    optimizers = build_optimizers(recipe, model)
    base_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    step = _resume(checkpoint, recipe, model, optimizers)
    batches = Batches(tokenizer, recipe)
    remaining = torch.utils.data.Subset(batches, range(step, recipe.steps))
    loader = torch.utils.data.DataLoader(remaining, batch_size=None, num_workers=machine.workers)
    run: Any = torch.compile(model, dynamic=False) if machine.compile else model
    progress = Progress(recipe, step)
    saved = time.monotonic()
    pad = _id(tokenizer, PAD)
    for rows, segments in loader:
        factor = schedule(recipe, step)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, rate in zip(groups, base_rates, strict=True):
            group["lr"] = rate * factor
        with torch.autocast(machine.device, torch.bfloat16):
            loss = batch_loss(run, rows.to(machine.device, torch.int64), segments.to(machine.device), pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1
        progress.show(step, loss)
        if time.monotonic() - saved > _SAVE_EVERY_S:
            _save(checkpoint, recipe, model, optimizers, step)
            saved = time.monotonic()
    _save(checkpoint, recipe, model, optimizers, step)
    return model


def _save(path: Path, recipe: TrainingRecipe, model: torch.nn.Module, optimizers: Optimizers, step: int) -> None:
    state = {
        "recipe": asdict(recipe),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _resume(path: Path, recipe: TrainingRecipe, model: torch.nn.Module, optimizers: Optimizers) -> int:
    """Load the checkpoint and return its step. `recipe.steps` may change until the decay starts."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    saved = TrainingRecipe(**state["recipe"])
    same_so_far = replace(saved, steps=recipe.steps) == recipe and schedule(saved, state["step"]) == 1.0
    if saved != recipe and not same_so_far:
        raise SystemExit(f"{path} belongs to another recipe: choose another --out folder or delete the file")
    model.load_state_dict(state["model"])
    for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved_state)
    return int(state["step"])


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise SystemExit(f"the tokenizer has no token {token}")
    return token_id


class Progress:
    """Progress display: one updating line on a terminal, otherwise a line every 30 seconds."""

    def __init__(self, recipe: TrainingRecipe, step: int) -> None:
        self._recipe, self._first, self._start = recipe, step, time.monotonic()
        self._last = 0.0

    def show(self, step: int, loss: torch.Tensor) -> None:
        now = time.monotonic()
        tty = sys.stderr.isatty()
        if now - self._last < (0.5 if tty else 30) and step != self._recipe.steps:
            return
        self._last = now
        elapsed = now - self._start
        done = step - self._first
        speed = done * self._recipe.tokens / max(elapsed, 1e-9)
        left = (self._recipe.steps - step) * elapsed / max(done, 1)
        bar = "#" * math.floor(20 * step / self._recipe.steps)
        where = f"[{bar:<20}] {step}/{self._recipe.steps}"
        line = f"{where} loss {float(loss.detach()):.4f} {speed / 1e3:.1f}k tokens/s, {left:.0f} s"
        print(line, end="\r" if tty and step != self._recipe.steps else "\n", file=sys.stderr, flush=True)


def report(tasks: list[Task], texts: list[str]) -> dict[str, Any]:
    """Return the accuracy overall, per kind and per phrasing family."""
    right = [check(task, text) for task, text in zip(tasks, texts, strict=True)]
    groups: dict[str, list[bool]] = {}
    for task, ok in zip(tasks, right, strict=True):
        groups.setdefault(task.kind, []).append(ok)
        groups.setdefault(task.family, []).append(ok)
    means = {name: sum(oks) / len(oks) for name, oks in sorted(groups.items())}
    return {"n": len(tasks), "accuracy": sum(right) / len(right), "groups": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(RECIPES), required=True)
    parser.add_argument(
        "--out", type=Path, help="folder for checkpoint.pt and the exported model/ (default: out/MODEL)"
    )
    parser.add_argument(
        "--start-from", type=Path, metavar="FOLDER", help="exported model to start from (default: random weights)"
    )
    parser.add_argument("--steps", type=int, help="override the recipe's number of steps")
    parser.add_argument("--seed", type=int, help="override the recipe's seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes that prepare batches")
    parser.add_argument(
        "--compile", action="store_true", help="compile the model (takes a minute; then 20 %% faster on a CPU)"
    )
    parser.add_argument("--eval-tasks", type=int, default=2000, help="held-out test tasks to score at the end")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=N", help="override other recipe fields")
    args = parser.parse_args()
    changes = {k: v for k in ("steps", "seed") if (v := getattr(args, k)) is not None}
    changes |= {k: type(getattr(RECIPES[args.model], k))(v) for k, _, v in (item.partition("=") for item in args.set)}
    recipe = replace(RECIPES[args.model], **changes)
    out: Path = args.out or Path("out", args.model)
    torch.set_float32_matmul_precision("high")
    model = build_model(recipe)
    started = {"started_from": load_weights(model, args.start_from)} if args.start_from else {}
    model = train(recipe, out, TrainingMachine(args.device, args.workers, args.compile), model)
    tokenizer = load_tokenizer()
    write_hf_folder(out / "model", model_config(recipe), model.state_dict(), tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    scores: dict[str, Any] = {"recipe": asdict(recipe), "parameters": parameters, **started}
    if args.eval_tasks:
        tasks = make_tasks("test", args.eval_tasks)
        scores |= report(tasks, cloud_answers(tasks, out / "model"))
        right = f"{100 * scores['accuracy']:.1f} % of {scores['n']} test tasks right"
        print(f"{args.model}: {parameters / 1e6:.2f} M parameters, {right}")
    (out / "report.json").write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
