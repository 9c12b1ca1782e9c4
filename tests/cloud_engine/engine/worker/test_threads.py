"""Threads of torch's that would have to share a processor are not used."""

import pytest
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.worker import devices


@pytest.fixture
def free(monkeypatch):
    """The number of free processors, as a list of one number; torch starts with three threads."""
    free = [3]

    class Governor:
        def __init__(self, most: int) -> None:
            assert most == 3

        def threads(self) -> int:
            return free[0]

    monkeypatch.setattr(devices, "ThreadGovernor", Governor)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield free
    torch.set_num_threads(before)


def test_a_step_uses_the_free_processors(free) -> None:
    yield_to_other_processes = devices.yields_to_other_processes(EngineConfig())
    for count in (3, 1, 2, 3):
        free[0] = count
        yield_to_other_processes()
        assert torch.get_num_threads() == count


def test_batch_invariant_sums_are_cut_alike(free) -> None:
    yield_to_other_processes = devices.yields_to_other_processes(EngineConfig(batch_invariant=True))
    free[0] = 1
    yield_to_other_processes()
    assert torch.get_num_threads() == 3
