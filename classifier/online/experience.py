"""Experience: a bounded SQLite file of judged local answers, with grades where the cloud answered too.

A row holds features (named blocks and hashed n-gram counts), numbers, and a digest of the question. The digest
recognises repeated questions, which features cannot: they treat all numbers alike. Texts are stored only if the user
asked for it. Counts and digests are no text, but anyone with the file and a guess at a prompt could check the guess.
Both therefore depend on a random key in the file, so that precomputed tables are useless, and two files do not reveal
that they contain the same questions.
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
from ...protocol.safety.database import Database, SharedFile, tables, transaction
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
    """One local answer judged by gate 3."""

    id: str
    pair: str
    at: float
    p_gain: float | None
    # Probability of asking the cloud too, given the gates' scores; 1 if the gates escalated.
    propensity: float
    # Share of requests sampled for exploration at that time; 0: only escalated answers were graded.
    explored: float
    # Grade of the local answer; None without a label.
    local: float | None
    # Grade of the cloud's answer; None without a label.
    cloud: float | None
    # Share of the local draft that the cloud accepted.
    accepted: float | None
    cloud_read: float | None
    cloud_written: float | None
    # Tier whose answer the user got.
    answered_by: str
    # Packed features, from `pack`.
    features: bytes
    # Feedback on the answer that the user got: 1 up, -1 down.
    thumb: int | None = None
    # Conversation as JSON (`kept_messages`), if texts are stored.
    messages: str | None = None
    answer: str | None = None
    feature_version: int = FEATURE_VERSION
    # 1 if this request was sampled for exploration, whatever the gates decided.
    sampled: int = 0
    # Digest of the question, from `ExperienceStore.digest`.
    question: bytes = b""
    # The cloud's answer, if texts are stored and the answer was not streamed.
    reply: str | None = None

    @property
    def pair_grades(self) -> tuple[float, float] | None:
        """Grades of both tiers without the user's thumb; None unless both were graded."""
        return None if self.local is None or self.cloud is None else (self.local, self.cloud)

    @property
    def grades(self) -> tuple[float, float] | None:
        """Grades of both tiers, where a thumb overrides the grade of the answer the user got; None without a label."""
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


class ExperienceStore:
    """An experience file, safe for any thread and several processes. Keeps the newest `most` rows.

    Raises ConfigurationError if the file cannot be opened, holds other data, or has another format version.
    """

    def __init__(self, path: Path, most: int = MAX_ROWS) -> None:
        self.path = path
        self._most = most
        self._until_pruned = 0  # rows to add before the next pruning
        self._database = Database(SharedFile(path, "for experience", "experience"), self._create)
        self._places = _keyed_places(self._key)

    def _create(self, connection: sqlite3.Connection) -> None:
        """Create the tables in one transaction, so that several processes may open a new file at once."""
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            existing = tables(connection)
            if existing and "observations" not in existing:
                raise ConfigurationError(f"{self.path} holds no experience: name another file.", param="experience")
            if existing and version != _VERSION:
                raise ConfigurationError(
                    f"{self.path} has format {version}; this version reads format {_VERSION}: move the file away.",
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
                f"The digest key in {self.path} is damaged: move the file away to start a new one.", param="experience"
            )

    def digest(self, prompt: PromptView) -> bytes:
        """Return a keyed digest of the normalised question and earlier turns, equal for repeated questions."""
        question = repeated_question(prompt).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(question, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def add(self, *observations: Observation, busy_s: float = 5.0) -> None:
        """Store all observations or none; wait up to `busy_s` while another process writes. Raises sqlite3.Error, or
        ValueError or OverflowError for a value that SQLite cannot store.
        """
        with self._writing(busy_s) as connection:
            connection.executemany(_INSERT, [astuple(self._keyed(row)) for row in observations])
            if self._until_pruned <= 0:
                connection.execute(
                    "DELETE FROM observations WHERE id NOT IN (SELECT id FROM observations ORDER BY at DESC LIMIT ?)",
                    (self._most,),
                )
                self._until_pruned = _PRUNE_EVERY
            self._until_pruned -= len(observations)

    def feedback(self, request_id: str, *, up: bool) -> bool:
        """Store a user's thumb (up or down), replacing an earlier thumb. Return whether the request is known."""
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
        """Return the newest rows of the model pair `pair` that have features of this version, newest first."""
        with self._database.use() as connection:
            rows = connection.execute(
                f"SELECT {_NAMES} FROM observations WHERE pair = ? AND feature_version = ? ORDER BY at DESC LIMIT ?",
                (pair, FEATURE_VERSION, limit),
            ).fetchall()
        return [self._keyed(Observation(*row)) for row in rows]

    def _keyed(self, row: Observation) -> Observation:
        """Swap n-gram buckets as the file's key determines; a second call restores them. Keep damaged features."""
        if not _is_packed(row.features):
            return row
        blocks, buckets, counts = unpack(row.features)
        exchanged = np.zeros(COUNTS, np.float32)
        exchanged[self._places[buckets]] = counts
        return replace(row, features=pack((blocks, exchanged)))

    def pairs(self) -> dict[str, int]:
        """Return the number of rows of each model pair."""
        with self._database.use() as connection:
            return dict(connection.execute("SELECT pair, count(*) FROM observations GROUP BY pair").fetchall())

    def close(self) -> None:
        self._database.close()


def _keyed_places(key: bytes) -> NDArray[np.intp]:
    """Return the bucket that each n-gram bucket is swapped with, (COUNTS,), as determined by `key`."""
    stream = hashlib.shake_256(key + b"buckets").digest(8 * COUNTS)
    one, other = np.argsort(np.frombuffer(stream, "<u8"), kind="stable").reshape(2, -1)
    places = np.empty(COUNTS, np.intp)
    places[one], places[other] = other, one
    return places


def kept_messages(messages: Sequence[Message]) -> str:
    """Return the newest messages as JSON: the last in full, earlier ones up to 40 messages and 100,000 characters."""
    kept: list[Message] = []
    chars = _MAX_CHARS
    for message in reversed(messages[-_MAX_MESSAGES:]):
        chars -= len(message.text)
        if kept and chars < 0:
            break
        kept.insert(0, Message(role=message.role, content=message.text))
    return msgspec.json.encode(kept).decode()


class _PackedRow(msgspec.Struct, array_like=True):
    """Serialised features: blocks and counts in float32, buckets in uint16."""

    blocks: dict[BlockName, bytes]
    buckets: bytes
    counts: bytes


prepare_types(_PackedRow)


def pack(features: Features) -> bytes:
    """Compress named blocks and counts into a few hundred bytes."""
    blocks, counts = features
    buckets = np.flatnonzero(counts).astype(np.uint16)
    packed: dict[BlockName, bytes] = {name: block.astype(np.float32).tobytes() for name, block in blocks.items()}
    return zlib.compress(msgspec.msgpack.encode(_PackedRow(packed, buckets.tobytes(), counts[buckets].tobytes())))


def readable(rows: Sequence[Observation]) -> list[Observation]:
    """Drop rows whose features are damaged and cannot be unpacked."""
    return [row for row in rows if _is_packed(row.features)]


def _is_packed(data: bytes) -> bool:
    try:
        unpack(data)
    except (zlib.error, ValueError, TypeError):  # TypeError: the column may hold another type than bytes
        return False
    return True


def unpack(data: bytes) -> tuple[dict[BlockName, Array], NDArray[np.uint16], Array]:
    """Return the blocks given to `pack`, the non-empty buckets, (m,) ascending, and their counts, (m,).

    Raises zlib.error or ValueError if `data` does not come from `pack`.
    """
    packed = msgspec.msgpack.decode(zlib.decompress(data), type=_PackedRow)
    blocks: dict[BlockName, Array] = {name: np.frombuffer(block, np.float32) for name, block in packed.blocks.items()}
    buckets, counts = np.frombuffer(packed.buckets, np.uint16), np.frombuffer(packed.counts, np.float32)
    if len(buckets) != len(counts) or buckets.max(initial=0) >= COUNTS:
        raise ValueError("buckets and counts do not match")
    return blocks, buckets, counts
