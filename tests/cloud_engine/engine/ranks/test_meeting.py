"""Ranks meet at one address with one key: strangers, doubles and other models are refused, silence is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from ports import free_port
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.rank_messages import Join, Refusal, decode
from updraft.cloud_engine.engine.ranks import store as stores
from updraft.cloud_engine.engine.ranks.meeting import KEY_VARIABLE, Meeting, fingerprint
from updraft.cloud_engine.engine.ranks.store import RankStore, StoreServer, begin_beats
from updraft.embedded import pocket
from updraft.protocol.errors import ConfigurationError

KEY = "a key of the group, long enough"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context[zmq.Socket[bytes]]()
    yield made
    made.term()  # ends the threads


def two_free_ports() -> int:
    while True:
        port = free_port()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1)):
                return port


def machines(port: int) -> EngineConfig:
    return EngineConfig(tensor_parallel=2, nnodes=2, master_addr="localhost", master_port=port)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return Meeting.of_machines(machines(two_free_ports()))


class Lost:
    def __init__(self) -> None:
        self.rank = -1
        self.told = threading.Event()

    def __call__(self, rank: int) -> None:
        self.rank = rank
        self.told.set()


@pytest.fixture
def lost(meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Lost]:
    lost = Lost()
    authenticator = meeting.authenticator(context)
    assert authenticator is not None
    StoreServer(meeting, context, Join(machines(1), "the model"), lost)
    yield lost
    authenticator.stop()


def test_ranks_join_once_and_share_values(
    meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]], lost: Lost
) -> None:
    with (
        zmq.Context[zmq.Socket[bytes]]() as other,
        closing(RankStore(meeting, context)) as first,
        closing(RankStore(Meeting.named(meeting.place), other)) as second,
    ):
        joined = decode(second.join(1))
        assert isinstance(joined, Join)
        assert joined.config == machines(1)
        for rank, reason in ((1, "another process"), (2, "same options"), (0, "same options")):
            refused = decode(second.join(rank))
            assert isinstance(refused, Refusal)
            assert reason in refused.reason
        waiting = threading.Thread(target=first.wait, args=(["address"],))
        waiting.start()
        second.set("address", b"\x00\xff")
        waiting.join(60)
        assert not waiting.is_alive()
        assert first.get("address") == b"\x00\xff"
        assert [first.add("count", 2), second.add("count", 3)] == [2, 5]
        assert first.check(["address", "count"])
        assert first.delete_key("address")
        assert not first.delete_key("address")
        assert not first.check(["address", "count"])
        assert lost.rank == -1


def test_a_stranger_gets_no_answer(meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]], lost: Lost) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as other:
        strangers = [
            Meeting(meeting.place, "another key, also long enough").connect(other, meeting.store, zmq.REQ),
            other.socket(zmq.REQ),
        ]
        strangers[1].connect(meeting.store)
        for stranger in strangers:
            stranger.linger = 0
            stranger.send_multipart((b"set", b"address", b"mine"))
        with socket.create_connection(("127.0.0.1", int(meeting.store.rpartition(":")[2]))) as probe:
            probe.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with closing(RankStore(meeting, context)) as own:
            own.set("x", b"1")
            assert not any(stranger.poll(200) for stranger in strangers)
            assert not own.check(["address"])
        for stranger in strangers:
            stranger.close()
        assert lost.rank == -1


def test_silence_is_noticed(
    meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]], lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_beats(meeting, context, 1)
    assert not lost.told.wait(0.5)
    monkeypatch.setattr(stores, "LOST_S", 0.3)  # less than the time between two beats
    assert lost.told.wait(120)
    assert lost.rank == 1


def test_one_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=KEY_VARIABLE):
        Meeting.of_machines(machines(1))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="16 characters"):
        Meeting.of_machines(machines(1))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert KEY not in repr(Meeting.of_machines(machines(1)))


def test_an_address_of_another_machine_cannot_be_bound(
    monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    meeting = Meeting("tcp://192.0.2.1:29500", KEY)
    with pytest.raises(ConfigurationError, match="address of this machine"):
        meeting.bind(context, meeting.commands)


def test_addresses_and_interfaces(tmp_path: Path) -> None:
    assert Meeting("tcp://[::1]:29500", KEY).store == "tcp://[::1]:29501"
    assert Meeting("tcp://127.0.0.1:29500", KEY).interface == "lo"
    assert Meeting(str(tmp_path)).interface == "lo"


def test_a_fingerprint_tells_models_apart() -> None:
    large, small = pocket.pocket_large_folder(), pocket.pocket_small_folder()
    assert fingerprint(large) == fingerprint(large) != fingerprint(small)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"nnodes": 2}, "equal shares of 1 ranks"),
        ({"nnodes": 2, "tensor_parallel": 3}, "equal shares"),
        ({"nnodes": 2, "tensor_parallel": 2, "node_rank": 2}, "node_rank below that"),
        ({"nnodes": 2, "tensor_parallel": 2}, "need master_addr"),
        ({"nnodes": 2, "tensor_parallel": 2, "master_addr": "a", "master_port": 65535}, "master_port"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, int], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        EngineConfig(**settings)  # type: ignore[arg-type]


def test_machines_have_consecutive_ranks() -> None:
    config = EngineConfig(tensor_parallel=2, pipeline_parallel=2, nnodes=2, node_rank=1, master_addr="a")
    assert list(config.own_ranks) == [2, 3]
