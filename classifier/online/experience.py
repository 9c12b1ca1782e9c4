"""Experience from use: a bounded SQLite file of judged local answers, with grades where the cloud answered too.

A row holds features (blocks by their names, and hashed counts of wording), numbers, and a digest by which a question
that is asked again is known: in features all numbers are alike. The texts themselves are kept only where the user asked
for it. Counts and digests are no text, but whoever has the file and a guess at a prompt can check it against them. Both
are keyed by the file's own random key, so that no table made elsewhere reads them, and two files do not tell that they
were asked the same.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ...protocol.requests import Message
from ...protocol.safety.database import Database
from ...protocol.safety.shared_file import SharedFile
from ...protocol.wal import tables, transaction
from ..arrays import Array
from ..features.blocks import FEATURE_VERSION, BlockName
from ..features.feature_rows import Features
from ..features.gate_inputs import PromptView
from ..features.parsed_question import repeated_question
from ..features.wording import COUNTS

MAX_ROWS = 20_000
_VERSION = 6
_PRUNE_EVERY = 200
_KEY_BYTES, _DIGEST_BYTES = 32, 16
_MAX_MESSAGES, _MAX_CHARS = 40, 100_000


@dataclass(frozen=True, slots=True)
class Observation:
    """One local answer that gate 3 has judged."""

    id: str
    pair: str
    at: float
    p_gain: float | None
    # Chance with which the cloud was asked too, given what the gates saw; 1 where they escalated it.
    propensity: float
    # Chance that any request had at that time of being sampled for exploration; 0: labels were one-sided.
    explored: float
    # Grade of the local answer; None without a label.
    local: float | None
    # Grade of the cloud's answer; None without a label.
    cloud: float | None
    # Share of the local draft that the cloud took over.
    accepted: float | None
    cloud_read: float | None
    cloud_written: float | None
    # The tier whose answer the user got.
    answered_by: str
    # Packed.
    features: bytes
    # 1 up, -1 down, on the answer that the user got.
    thumb: int | None = None
    # The conversation, where texts are kept: see `kept_messages`.
    messages: str | None = None
    answer: str | None = None
    feature_version: int = FEATURE_VERSION
    # 1 if this request was sampled for exploration, whatever the gates thought of it.
    sampled: int = 0
    # Digest of the question.
    question: bytes = b""
    # The cloud's answer, where texts are kept and it did not go by in pieces.
    reply: str | None = None

    @property
    def pair_grades(self) -> tuple[float, float] | None:
        """The scores of both tiers, without thumbs; None where not both were graded."""
        return None if self.local is None or self.cloud is None else (self.local, self.cloud)

    @property
    def grades(self) -> tuple[float, float] | None:
        """The scores of both tiers; a thumb overrules the tier that it is about."""
        local, cloud = self.local, self.cloud
        if self.thumb is not None:
            liked = float(self.thumb > 0)
            if self.answered_by == "local":
                local, cloud = liked, 1.0 if cloud is None else cloud
            else:
                local, cloud = 0.0 if local is None else local, liked
        return None if local is None or cloud is None else (local, cloud)


_NAMES = ", ".join(f.name for f in fields(Observation))
_SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS observations ({_NAMES.replace('id,', 'id TEXT PRIMARY KEY,', 1)})",
    "CREATE INDEX IF NOT EXISTS observations_at ON observations (pair, at)",
    "CREATE TABLE IF NOT EXISTS digest_key (key)",
)
_INSERT = f"INSERT OR REPLACE INTO observations ({_NAMES}) VALUES ({', '.join('?' * len(fields(Observation)))})"


class Experience:
    """Safe to use from any thread and by several processes. Keeps the newest `most` rows.

    Raises ConfigurationError if the file cannot be opened, holds something else, or is one of another version.
    """

    def __init__(self, path: Path, most: int = MAX_ROWS) -> None:
        self.path = path
        self._most = most
        self._until_pruned = 0  # rows
        self._database = Database(SharedFile(path, "for experience", "experience"), self._create)
        self._places = _keyed_places(self._key)

    def _create(self, connection: sqlite3.Connection) -> None:
        """The tables, in one transaction, so that several processes may open a new file at once."""
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            found = tables(connection)
            if found and "observations" not in found:
                raise ConfigurationError(f"{self.path} holds no experience: name another file.", param="experience")
            if found and version != _VERSION:
                raise ConfigurationError(
                    f"{self.path} has format {version}, this version reads {_VERSION}: move it away.",
                    param="experience",
                )
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO digest_key SELECT ? WHERE NOT EXISTS (SELECT key FROM digest_key)",
                (os.urandom(_KEY_BYTES),),
            )
            connection.execute(f"PRAGMA user_version={_VERSION}")
            (self._key,) = connection.execute("SELECT key FROM digest_key").fetchone()
        if not isinstance(self._key, bytes) or len(self._key) != _KEY_BYTES:
            raise ConfigurationError(
                f"The key of the digests in {self.path} is damaged: move it away, and a new one is begun.",
                param="experience",
            )

    def digest(self, prompt: PromptView) -> bytes:
        """The digest of the question in `prompt` in this file: equal for those that no gate tells apart by anything
        but their numbers, and that have the same numbers.
        """
        question = repeated_question(prompt).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(question, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def add(self, *observations: Observation, busy_s: float = 5.0) -> None:
        """Keep all of them or none, waiting up to `busy_s` while another process writes. Raises sqlite3.Error, and
        ValueError or OverflowError where one holds what SQLite cannot.
        """
        with self._writing(busy_s) as connection:
            connection.executemany(_INSERT, [astuple(self._keyed(each)) for each in observations])
            if self._until_pruned <= 0:
                connection.execute(
                    "DELETE FROM observations WHERE id NOT IN (SELECT id FROM observations ORDER BY at DESC LIMIT ?)",
                    (self._most,),
                )
                self._until_pruned = _PRUNE_EVERY
            self._until_pruned -= len(observations)

    def feedback(self, request_id: str, *, up: bool) -> bool:
        """Keep a thumb; whether there is such a request. The last thumb counts."""
        with self._writing(5.0) as connection:
            done = connection.execute("UPDATE observations SET thumb = ? WHERE id = ?", (1 if up else -1, request_id))
            return done.rowcount > 0

    @contextmanager
    def _writing(self, busy_s: float) -> Generator[sqlite3.Connection]:
        with self._database.use() as connection:
            connection.execute(f"PRAGMA busy_timeout={round(busy_s * 1000)}")
            with transaction(connection):
                yield connection

    def rows(self, pair: str, *, limit: int = MAX_ROWS) -> list[Observation]:
        """The newest first, those of this version's features only."""
        with self._database.use() as connection:
            found = connection.execute(
                f"SELECT {_NAMES} FROM observations WHERE pair = ? AND feature_version = ? ORDER BY at DESC LIMIT ?",
                (pair, FEATURE_VERSION, limit),
            ).fetchall()
        return [self._keyed(Observation(*row)) for row in found]

    def _keyed(self, row: Observation) -> Observation:
        """The same with its buckets exchanged by the file's key; twice gives them back. Damaged features stay."""
        if not _is_packed(row.features):
            return row
        blocks, buckets, counts = unpack(row.features)
        exchanged = np.zeros(COUNTS, np.float32)
        exchanged[self._places[buckets]] = counts
        return replace(row, features=pack((blocks, exchanged)))

    def pairs(self) -> dict[str, int]:
        """Number of rows by pair."""
        with self._database.use() as connection:
            return dict(connection.execute("SELECT pair, count(*) FROM observations GROUP BY pair").fetchall())

    def close(self) -> None:
        self._database.close()


def _keyed_places(key: bytes) -> NDArray[np.intp]:
    """(COUNTS,) the partner of each bucket: `key` puts them into pairs."""
    stream = hashlib.shake_256(key + b"buckets").digest(8 * COUNTS)
    one, other = np.argsort(np.frombuffer(stream, "<u8"), kind="stable").reshape(2, -1)
    places = np.empty(COUNTS, np.intp)
    places[one], places[other] = other, one
    return places


def kept_messages(messages: Sequence[Message]) -> str:
    """The texts of the latest messages as JSON, the last whole, of the others as many as there is room for."""
    kept: list[Message] = []
    room = _MAX_CHARS
    for message in reversed(messages[-_MAX_MESSAGES:]):
        room -= len(message.text)
        if kept and room < 0:
            break
        kept.insert(0, Message(role=message.role, content=message.text))
    return msgspec.json.encode(kept).decode()


class _Packed(msgspec.Struct, array_like=True):
    """Features as bytes: blocks and counts are float32, buckets uint16."""

    blocks: dict[BlockName, bytes]
    buckets: bytes
    counts: bytes


prepare_types(_Packed)


def pack(features: Features) -> bytes:
    """Blocks, with their names, and counts, compressed; a few hundred bytes."""
    blocks, counts = features
    buckets = np.flatnonzero(counts).astype(np.uint16)
    packed: dict[BlockName, bytes] = {name: block.astype(np.float32).tobytes() for name, block in blocks.items()}
    return zlib.compress(msgspec.msgpack.encode(_Packed(packed, buckets.tobytes(), counts[buckets].tobytes())))


def readable(rows: Sequence[Observation]) -> list[Observation]:
    """Those whose features can be unpacked; the others were damaged on the disk."""
    return [row for row in rows if _is_packed(row.features)]


def _is_packed(data: bytes) -> bool:
    try:
        unpack(data)
    except (zlib.error, ValueError, TypeError):  # the last one: SQLite holds what is no bytes, too
        return False
    return True


def unpack(data: bytes) -> tuple[dict[BlockName, Array], NDArray[np.uint16], Array]:
    """The blocks of `pack`, the buckets that hold something, (m,) in rising order, and their counts, (m,).

    Raises zlib.error or ValueError if `data` is not what `pack` gave.
    """
    packed = msgspec.msgpack.decode(zlib.decompress(data), type=_Packed)
    blocks: dict[BlockName, Array] = {name: np.frombuffer(block, np.float32) for name, block in packed.blocks.items()}
    buckets, counts = np.frombuffer(packed.buckets, np.uint16), np.frombuffer(packed.counts, np.float32)
    if len(buckets) != len(counts) or buckets.max(initial=0) >= COUNTS:
        raise ValueError("counts of no wording")
    return blocks, buckets, counts
