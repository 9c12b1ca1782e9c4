"""How a kernel is launched: tile sizes, warps and stages, measured on this GPU or by a heuristic.

Measured launches are in `kernels/tuned/<GPU name>.json`: {kernel: {key: {"num_warps": ..., "tiles": {...}}}}. A plain
function beside each kernel makes its keys. `updraft bench kernels --tune` writes the file.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from ...protocol.errors import ConfigurationError

TUNED = Path(__file__).parents[1] / "tuned"
_MOST_WARPS, _MOST_STAGES, _MOST_TILE = 32, 16, 2**16


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is launched."""

    num_warps: int = 4
    num_stages: int = 2
    # The kernel's constexpr arguments that change only its speed, by name.
    tiles: Mapping[str, int] = field(default_factory=dict[str, int])


#: (kernel, key)
LaunchKey = tuple[str, str]
Launches = Mapping[str, Mapping[str, Launch]]


@dataclass(frozen=True, slots=True)
class Trial:
    """Launches to try while tuning, instead of those in the file."""

    # Everything else is launched by the heuristic.
    launches: Mapping[LaunchKey, Launch] = field(default_factory=dict[LaunchKey, Launch])
    # What the heuristic says for each key that was looked up.
    looked_up: dict[LaunchKey, Launch] = field(default_factory=dict[LaunchKey, Launch])


_TRIAL: ContextVar[Trial | None] = ContextVar("launches being tried", default=None)


@contextmanager
def trying(trial: Trial) -> Generator[None]:
    """Launches and plans inside the block follow `trial` instead of what was measured."""
    token = _TRIAL.set(trial)
    try:
        yield
    finally:
        _TRIAL.reset(token)


def launch_for(kernel: str, key: str, gpu_name: str, heuristic: Launch) -> Launch:
    """The measured launch of `kernel` on a GPU (`torch.cuda.get_device_name()`), or else the heuristic's.

    Raises ConfigurationError if the file of this GPU is damaged or was made for other tiles.
    """
    trial = _TRIAL.get()
    if trial is not None:
        trial.looked_up[kernel, key] = heuristic
        return trial.launches.get((kernel, key), heuristic)
    path = TUNED / f"{file_name(gpu_name)}.json"
    measured = read_launches(path).get(kernel, {}).get(key)
    if measured is None:
        return heuristic
    if measured.tiles.keys() != heuristic.tiles.keys():
        expected = ", ".join(heuristic.tiles) or "none"
        raise _damaged(path, f"{kernel}, {key}: its tiles are {expected}, not {', '.join(measured.tiles) or 'none'}")
    return measured


@functools.cache
def read_launches(path: Path) -> Launches:
    """The launches of a file, by kernel and key; none without a file. Raises ConfigurationError for a damaged file."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    found: dict[str, dict[str, Launch]] = {}
    for kernel, entries in _objects(written, path, "the file"):
        for key, entry in _objects(entries, path, kernel):
            found.setdefault(kernel, {})[key] = _launch(entry, path, f"{kernel}, {key}")
    return found


def write_launches(path: Path, launches: Launches) -> None:
    """Writes `launches`, sorted by name. Raises ConfigurationError if the file cannot be written."""
    written = {
        kernel: {key: asdict(launch) for key, launch in sorted(entries.items())}
        for kernel, entries in sorted(launches.items())
        if entries
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Launches cannot be written to {path}: {error}. Tune from a checkout.") from error
    read_launches.cache_clear()


def file_name(gpu_name: str) -> str:
    """`NVIDIA H200` to `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def _launch(entry: object, path: Path, where: str) -> Launch:
    values = dict(_objects(entry, path, where))
    unknown = values.keys() - {each.name for each in fields(Launch)}
    if unknown:
        raise _damaged(path, f"{where} has unknown {', '.join(sorted(unknown))}")
    warps, stages = values.get("num_warps", 4), values.get("num_stages", 2)
    if not _is_power_of_two(warps, _MOST_WARPS):
        raise _damaged(path, f"{where}: num_warps must be a power of two up to {_MOST_WARPS}, not {warps!r}")
    if not isinstance(stages, int) or isinstance(stages, bool) or not 1 <= stages <= _MOST_STAGES:
        raise _damaged(path, f"{where}: num_stages must be 1 to {_MOST_STAGES}, not {stages!r}")
    tiles = dict(_objects(values.get("tiles", {}), path, f"{where}, tiles"))
    for name, size in tiles.items():
        if not _is_power_of_two(size, _MOST_TILE):
            raise _damaged(path, f"{where}: {name} must be a power of two up to {_MOST_TILE}, not {size!r}")
    return Launch(cast("int", warps), stages, cast("dict[str, int]", tiles))


def _objects(value: object, path: Path, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise _damaged(path, f"{where} must be an object, not {value!r}")
    return list(cast("dict[str, Any]", value).items())


def _is_power_of_two(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most and value & (value - 1) == 0


def _damaged(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{path}: {problem}. Delete the file, or write it again: updraft bench kernels --tune.")
