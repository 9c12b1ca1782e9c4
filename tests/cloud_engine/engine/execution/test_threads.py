"""Threads of torch's that would have to share a processor are not used."""

import pytest
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.execution import devices


@pytest.fixture
def free(monkeypatch):
    """The number of threads there is room for, as a list of one; torch has three before."""
    room = [3]

    class Governor:
        def __init__(self, most: int) -> None:
            assert most == 3

        def threads(self) -> int:
            return room[0]

    monkeypatch.setattr(devices, "ThreadGovernor", Governor)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield room
    torch.set_num_threads(before)


def test_a_step_uses_what_there_is_room_for(free) -> None:
    yield_to_neighbours = devices.yields_to_neighbours(EngineConfig())
    for room in (3, 1, 2, 3):
        free[0] = room
        yield_to_neighbours()
        assert torch.get_num_threads() == room


def test_batch_invariant_sums_are_cut_alike(free) -> None:
    yield_to_neighbours = devices.yields_to_neighbours(EngineConfig(batch_invariant=True))
    free[0] = 1
    yield_to_neighbours()
    assert torch.get_num_threads() == 3
