"""Trains the pocket models: `python -m updraft.embedded.train --model small --out out/small`.

One command per model, deterministic by seed, resumable, on CPU or CUDA. Batch number i is a pure function of (seed, i), so
a resumed run sees exactly the batches it would have seen. Both models see the same stream; only size and step count of
their recipes differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from .export import write_hf_folder
from .tasks import Task, check, make_tasks, stream
from .tokenizer import IM_END, PAD, VOCAB_SIZE, chat_text, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROW = 512  # tokens of one training row: the context length of the pocket models
# The answer is what we want learned; a little weight on the questions makes their log-probability meaningful,
# which the router reads as "how unusual is this question to the small model".
_QUESTION_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Recipe:
    """Size and schedule of one model. `batch` counts rows of `ROW` tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    learning_rate: float
    batch: int
    steps: int
    warmup: int = 200
    weight_decay: float = 0.05
    seed: int = 1


RECIPES = {
    "small": Recipe(hidden=128, layers=4, heads=4, kv_heads=2, feed_forward=352, learning_rate=3e-3, batch=64, steps=6_000),
    "large": Recipe(hidden=384, layers=8, heads=6, kv_heads=2, feed_forward=1024, learning_rate=1.5e-3, batch=128, steps=9_000),
}  # fmt: skip


class Batches(torch.utils.data.Dataset[np.ndarray]):
    """Batch i as uint16 (batch, ROW + 1); the top bit marks tokens of an answer. Whole tasks are packed, none is cut."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self._tokenizer, self._recipe = tokenizer, recipe
        self._pad = tokenizer.token_to_id(PAD)

    def __len__(self) -> int:
        return self._recipe.steps

    def __getitem__(self, index: int) -> np.ndarray:
        tasks = stream("train", self._recipe.seed * 1_000_003 + index)
        rows = np.full((self._recipe.batch, ROW + 1), self._pad, np.uint16)
        row = column = 0
        while row < len(rows):
            for tokens in self._encode(list(islice(tasks, 64))):
                if column + len(tokens) > ROW + 1:
                    row, column = row + 1, 0
                if row == len(rows):
                    break
                rows[row, column : column + len(tokens)] = tokens
                column += len(tokens)
        return rows

    def _encode(self, tasks: list[Task]) -> list[np.ndarray]:
        questions = self._tokenizer.encode_batch_fast([chat_text(t.prompt) for t in tasks], add_special_tokens=False)
        answers = self._tokenizer.encode_batch_fast([f"{t.answer}{IM_END}\n" for t in tasks], add_special_tokens=False)
        return [
            np.array([*q.ids, *(i | 0x8000 for i in a.ids)], np.uint16) for q, a in zip(questions, answers, strict=True)
        ]


def build_model(recipe: Recipe) -> torch.nn.Module:
    """A randomly initialised Llama of the recipe's size (transformers' own implementation)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=ROW,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The plain config.json of the exported model."""
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
        "max_position_embeddings": ROW,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def batch_loss(model: torch.nn.Module, rows: torch.Tensor, pad: int) -> torch.Tensor:
    """Weighted next-token cross-entropy of rows (batch, ROW + 1), int64 with bit 15 marking answers."""
    tokens = rows & 0x7FFF
    weights = torch.where(rows[:, 1:] >= 0x8000, 1.0, _QUESTION_WEIGHT) * (tokens[:, 1:] != pad)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    ramp = min(1.0, (step + 1) / max(1, min(recipe.warmup, recipe.steps // 4)))
    return recipe.learning_rate * ramp * (1 - step / recipe.steps)


def train(recipe: Recipe, out: Path, *, device: str, workers: int, compile_model: bool) -> torch.nn.Module:
    """Train to the end of the recipe, resuming from `out/checkpoint.pt` where one lies. Returns the model on `device`."""
    tokenizer = train_tokenizer()
    model = build_model(recipe).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=device == "cuda")
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    step = _resume(checkpoint, recipe, model, optimizer)
    batches = Batches(tokenizer, recipe)
    remaining = torch.utils.data.Subset(batches, range(step, recipe.steps))
    loader = torch.utils.data.DataLoader(remaining, batch_size=None, num_workers=workers)
    run: Any = torch.compile(model) if compile_model else model
    progress = Progress(recipe, step)
    saved = time.monotonic()
    pad = tokenizer.token_to_id(PAD)
    for rows in loader:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        moved = rows.to(torch.int64) if isinstance(rows, torch.Tensor) else torch.from_numpy(rows.astype(np.int64))
        with torch.autocast(device, torch.bfloat16):
            loss = batch_loss(run, moved.to(device, non_blocking=True), pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        progress.show(step, loss)
        if time.monotonic() - saved > 120:
            _save(checkpoint, recipe, model, optimizer, step)
            saved = time.monotonic()
    _save(checkpoint, recipe, model, optimizer, step)
    return model


def _save(path: Path, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"recipe": asdict(recipe), "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _resume(path: Path, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["recipe"] != asdict(recipe):
        raise SystemExit(f"{path} belongs to another recipe: choose another --out or delete it")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


class Progress:
    """One updating line on a terminal, a line every 30 seconds elsewhere."""

    def __init__(self, recipe: Recipe, step: int) -> None:
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
        speed = done * self._recipe.batch * ROW / max(elapsed, 1e-9)
        left = (self._recipe.steps - step) * elapsed / max(done, 1)
        bar = "#" * math.floor(20 * step / self._recipe.steps)
        line = f"[{bar:<20}] {step}/{self._recipe.steps} loss {float(loss):.4f} {speed / 1e3:.0f}k tokens/s, {left:.0f} s left"
        print(line, end="\r" if tty and step != self._recipe.steps else "\n", file=sys.stderr, flush=True)


@torch.inference_mode()
def answer(model: torch.nn.Module, tokenizer: Tokenizer, tasks: list[Task], batch: int = 500) -> list[str]:
    """Greedy answers to `tasks`, in order."""
    device = next(model.parameters()).device
    pad, stop = tokenizer.token_to_id(PAD), tokenizer.token_to_id(IM_END)
    texts: list[str] = []
    for start in range(0, len(tasks), batch):
        encoded = [
            tokenizer.encode(chat_text(t.prompt), add_special_tokens=False).ids for t in tasks[start : start + batch]
        ]
        width = max(map(len, encoded))
        ids = torch.tensor([[pad] * (width - len(e)) + e for e in encoded], device=device)
        mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded], device=device)
        generate: Any = model.generate
        output = generate(
            ids, attention_mask=mask, max_new_tokens=240, do_sample=False, pad_token_id=pad, eos_token_id=stop
        )
        texts += [tokenizer.decode(row, skip_special_tokens=True) for row in output[:, width:].tolist()]
    return texts


def report(tasks: list[Task], texts: list[str]) -> dict[str, Any]:
    """Accuracy overall, per kind and per phrasing family."""
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
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint.pt and the exported model/")
    parser.add_argument("--steps", type=int, help="override the recipe's number of steps")
    parser.add_argument("--batch", type=int, help="override the recipe's rows per batch")
    parser.add_argument("--seed", type=int, help="override the recipe's seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes that prepare batches")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (worth it on CUDA)")
    parser.add_argument("--eval-tasks", type=int, default=2000, help="held-out test tasks to score at the end")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=N", help="override other recipe fields")
    args = parser.parse_args()
    changes = {k: v for k in ("steps", "batch", "seed") if (v := getattr(args, k)) is not None}
    changes |= {k: type(getattr(RECIPES[args.model], k))(v) for k, _, v in (item.partition("=") for item in args.set)}
    recipe = replace(RECIPES[args.model], **changes)
    torch.set_float32_matmul_precision("high")
    model = train(recipe, args.out, device=args.device, workers=args.workers, compile_model=args.compile)
    tokenizer = train_tokenizer()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write_hf_folder(args.out / "model", model_config(recipe), state, tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    scores: dict[str, Any] = {"recipe": asdict(recipe), "parameters": parameters}
    if args.eval_tasks:
        tasks = make_tasks("test", args.eval_tasks)
        scores |= report(tasks, answer(model.eval(), tokenizer, tasks))
        print(
            f"{args.model}: {parameters / 1e6:.2f} M parameters, {100 * scores['accuracy']:.1f} % of {scores['n']} right"
        )
    (args.out / "report.json").write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
