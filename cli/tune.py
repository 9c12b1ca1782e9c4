"""`updraft tune`: measures the fastest settings of a model on this machine, and stores them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from .shared import json_output, output

if TYPE_CHECKING:
    from ..local_engine.tuning.search import TrialResult, Tuning


def tune(
    model: Annotated[
        str, typer.Argument(help="Model: pocket, a GGUF file, a pulled model's name, or hf:owner/repo:file.gguf.")
    ] = "pocket",
    as_json: json_output.Flag = False,
) -> None:
    """Find the fastest thread count, weight layout and batch size of a model, within 30 seconds after its first load.

    Each candidate runs in a separate process. A setting changes only if two runs show it faster by more than the noise.
    KV cache type, max_num_seqs and max_model_len are lowered if memory is short. The result is stored for this model
    and machine, and applies unless you set these options yourself.

    \b
    Examples
      updraft tune
      updraft tune Qwen3-0.6B-Q8_0 --json
    """
    from pathlib import Path

    from ..embedded.pocket import pocket_small_gguf
    from ..local_engine.build_check import ensure_usable_build
    from ..local_engine.machine.machine import this_machine
    from ..local_engine.machine.memory_fit import free_memory
    from ..local_engine.tuning.search import tune as measure
    from ..protocol.errors import InvalidRequestError
    from .models.names import resolve

    name = resolve(model)
    if name == "none":
        raise InvalidRequestError("No model to tune: name a GGUF file.")
    path = pocket_small_gguf() if name == "pocket" else Path(name)
    ensure_usable_build(pocket_small_gguf())
    available = free_memory(this_machine())
    if as_json:
        json_output.show(_facts(path.name, measure(path, available)))
    else:
        output.echo(
            f"{'':26}{'threads':>8}{'repack':>8}{'ubatch':>8}{'prompt tok/s':>14}{'answer tok/s':>14}{'noise':>8}"
        )
        _conclude(measure(path, available, report=_line))


def _line(run: TrialResult) -> None:
    choice = run.choice
    settings = f"{run.note:<26}{choice.threads:>8}{'yes' if choice.repack else 'no':>8}{choice.ubatch:>8}"
    speeds = f"{run.prompt_tokens_per_s:>14,.1f}{run.answer_tokens_per_s:>14,.1f}{run.noise:>8.0%}"
    output.echo(settings + (speeds if run.answer_tokens_per_s else "  failed"))


def _conclude(tuning: Tuning) -> None:
    import msgspec

    chosen = {name: value for name, value in msgspec.structs.asdict(tuning.settings).items() if value is not None}
    if tuning.skipped:
        output.echo(f"Skipped for lack of time: {', '.join(tuning.skipped)}.")
    if chosen:
        values = ", ".join(f"{name}={value}" for name, value in chosen.items())
        output.echo(f"Stored after {tuning.seconds:.0f} s: {values} ({tuning.gain:.0%} less time than with defaults).")
    else:
        output.echo(f"Defaults kept after {tuning.seconds:.0f} s: nothing was faster by more than the noise.")


def _facts(name: str, tuning: Tuning) -> dict[str, object]:
    import msgspec

    return {
        "model": name,
        "settings": msgspec.to_builtins(tuning.settings),
        "default": dataclasses.asdict(tuning.default),
        "gain": tuning.gain,
        "seconds": tuning.seconds,
        "skipped": list(tuning.skipped),
        "runs": [
            {
                "note": run.note,
                **dataclasses.asdict(run.choice),
                "prompt_tokens_per_s": run.prompt_tokens_per_s,
                "answer_tokens_per_s": run.answer_tokens_per_s,
                "noise": run.noise,
            }
            for run in tuning.runs
        ],
    }
