"""Resources of this process: cores, processor time, memory. A container can often use less than it sees.

Limits of Linux control groups (v1 and v2) are read from files; on other systems, psutil reports everything.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Instruction sets that llama.cpp supports, as Linux names them.
_INSTRUCTION_SETS = (
    *("ssse3", "avx", "f16c", "fma", "bmi2", "avx2", "avx_vnni", "avx512f", "avx512vbmi", "avx512_vnni"),
    *("avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "sve", "sme"),
)
_THREAD_PARAMETERS = 20_000_000
_NO_LIMIT = 2**60  # version 1 of control groups reports "no limit" as a huge number


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor and memory that this process may use."""

    processor: str
    # Number of physical cores.
    cores: int
    # Number of logical processors, hyper-threads included.
    processors: int
    # Limit of processor time, as a number of processors; None for no limit.
    quota: float | None
    # Memory limit in bytes.
    memory: int
    # Bytes available now without swapping.
    available: int
    # Instruction sets that matter to llama.cpp, as Linux names them; empty if unknown.
    instruction_sets: tuple[str, ...]

    @property
    def threads(self) -> int:
        """Number of threads worth running, at most one per physical core, because more would wait for each other."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))


def default_threads(parameters: int) -> int:
    """Return the thread count for a model. In a small model, more threads would mostly wait for each other."""
    return min(this_machine().threads, max(1, parameters // _THREAD_PARAMETERS))


def this_machine(root: Path = Path("/")) -> Machine:
    """Return the current state of this machine. `root`: the folder that contains `proc` and `sys`."""
    limits = list(_control_groups(root))
    memory = psutil.virtual_memory()
    quotas = [quota for folder in limits for quota in _quota(folder)]
    caps = [cap for folder in limits for cap in _memory_cap(folder)]
    info = _read(root / "proc/cpuinfo")
    allowed = _allowed()
    return Machine(
        processor=_model_name(info) or platform.processor() or platform.machine(),
        cores=_physical(root, allowed),
        processors=len(allowed),
        quota=min(quotas, default=None),
        memory=min([memory.total, *(limit for limit, _ in caps)]),
        available=max(0, min([memory.available, *(free for _, free in caps)])),
        instruction_sets=_instruction_sets(info),
    )


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical(root: Path, allowed: set[int]) -> int:
    """Count the physical cores of the processors in `allowed`; hyper-threads of one core list the same siblings."""
    folder = root / "sys/devices/system/cpu"
    siblings = {_read(folder / f"cpu{index}/topology/thread_siblings_list") for index in allowed}
    if "" not in siblings:
        return max(1, len(siblings))
    return max(1, min(psutil.cpu_count(logical=False) or len(allowed), len(allowed)))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process: its own groups and their ancestors."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        mounts = [controllers, ""] if controllers else [""]
        base = next((path for name in mounts if (path := root / "sys/fs/cgroup" / name).is_dir()), None)
        if base is None or (controllers and not {"cpu", "memory"} & set(controllers.split(","))):
            continue
        inside = [part for part in Path(group).parts if part not in ("/", "..")]
        # In a container, `group` may be a path of the host that does not exist here. `base` is then the own group.
        yield from (base.joinpath(*inside[:depth]) for depth in range(len(inside) + 1))


def _quota(folder: Path) -> Iterator[float]:
    """Yield a control group's processor limit, in processors (`cpu.max` in version 2, `cpu.cfs_*` in version 1)."""
    words = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us"),
        _read(folder / "cpu.cfs_period_us"),
    ]
    with contextlib.suppress(ValueError, ZeroDivisionError, IndexError):  # "max", "-1" and a missing file mean no limit
        quota = int(words[0]) / int(words[1])
        if quota > 0:
            yield quota


def _memory_cap(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield a control group's memory limit, and the bytes left after inactive file pages are reclaimed."""
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if limit.isdigit() and int(limit) < _NO_LIMIT:
        reclaimable = re.findall(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
        yield int(limit), int(limit) - int(used or 0) + max(map(int, reclaimable), default=0)


def _instruction_sets(info: str) -> tuple[str, ...]:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    present = set(match[1].split()) if match else set[str]()
    return tuple(name for name in _INSTRUCTION_SETS if name in present)


def _model_name(info: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return match[1].strip() if match else ""


def _read(path: Path) -> str:
    """Return the text of a file; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
