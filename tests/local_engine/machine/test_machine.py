"""A container's share is read from its control groups, of either version."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from updraft.local_engine.machine.machine import Machine, this_machine

GIB = 2**30


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    machine = this_machine()
    allowed = os.sched_getaffinity(0)
    assert 1 <= machine.cores <= machine.processors == len(allowed)
    assert 0 < machine.available <= machine.memory <= psutil.virtual_memory().total
    assert 1 <= machine.threads <= machine.cores


def test_version_2(tmp_path) -> None:
    """The narrowest limit of all groups above counts; unused pages of files count as free."""
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{GIB // 2}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB // 8}\nactive_file 9\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
        },
    )
    machine = this_machine(root)
    assert machine.quota == 1.5
    assert machine.memory == GIB
    assert machine.available == GIB // 2 + GIB // 8
    assert machine.threads == 1


def test_version_1(tmp_path) -> None:
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n3:pids:/box\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIB // 4),
            "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 3\ntotal_inactive_file {GIB // 8}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    machine = this_machine(root)
    assert machine.quota == 4.0
    assert (machine.memory, machine.available) == (GIB, GIB - GIB // 4 + GIB // 8)


def test_a_path_of_the_host_inside_a_container(tmp_path) -> None:
    """The group's path is the host's, and what is mounted at the base is the container's own group."""
    root = put(tmp_path, {"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.max": str(GIB)})
    assert this_machine(root).memory == GIB


def test_no_control_groups_and_no_topology(tmp_path) -> None:
    machine = this_machine(tmp_path)
    assert machine.quota is None
    assert machine.cores == min(psutil.cpu_count(logical=False) or 1, machine.processors)


def test_hyper_threads_are_one_core(tmp_path) -> None:
    siblings = {f"sys/devices/system/cpu/cpu{index}/topology/thread_siblings_list": "0-63" for index in range(64)}
    assert this_machine(put(tmp_path, siblings)).cores == 1


def test_instruction_sets(tmp_path) -> None:
    info = "model name\t: Some Processor\nflags\t\t: fpu sse avx2 amx_int8 avx512f\n"
    machine = this_machine(put(tmp_path, {"proc/cpuinfo": info}))
    assert machine.processor == "Some Processor"
    assert machine.instruction_sets == ("avx2", "avx512f", "amx_int8")


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (0.5, 1), (2.9, 2), (16.0, 8)])
def test_threads_follow_the_quota(quota, threads) -> None:
    assert Machine("p", 8, 16, quota, GIB, GIB, ()).threads == threads
