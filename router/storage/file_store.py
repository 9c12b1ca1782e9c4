"""Store of uploaded files: contents in a private folder, and metadata in SQLite in the same folder."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

import msgspec

from ...protocol.errors import DiskSpaceError, InvalidRequestError
from ...protocol.http.wire import new_id
from ...protocol.safety.database import SharedFile, create_tables
from .answer_store import Page, StoreDatabase, only

DATABASE = "files.sqlite3"
MB = 2**20
_UNFINISHED_S = 86400  # seconds until an interrupted upload is deleted
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS files (
      position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL,
      purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
      complete INTEGER NOT NULL
    ) STRICT""",
    """CREATE TABLE IF NOT EXISTS batches (
      position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, input_id TEXT NOT NULL,
      active INTEGER NOT NULL, output_id TEXT, error_id TEXT, outputs_expire_s INTEGER, body TEXT NOT NULL
    ) STRICT""",
    """CREATE VIEW IF NOT EXISTS complete_files AS
      SELECT * FROM files WHERE complete AND coalesce(expires_at > CAST(strftime('%s') AS INTEGER), true)""",
)
_COLUMNS = "id, bytes, created_at, filename, purpose, expires_at"


class FileObject(msgspec.Struct):
    """A file as OpenAI describes it."""

    id: str
    bytes: int
    # Time of creation, in seconds since the epoch.
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: None = None


class FilesDatabase(StoreDatabase):
    """Database of files and batches, safe for threads and processes. Opening raises ConfigurationError."""

    def __init__(self, folder: Path) -> None:
        file = SharedFile(folder / DATABASE, "for uploaded files", "files")
        super().__init__(file, lambda connection: create_tables(connection, _SCHEMA))


@dataclass(frozen=True, slots=True)
class FileMetadata:
    """Metadata of a complete file."""

    size: int
    filename: str
    purpose: str
    # Lifetime from now, in seconds. None: for ever.
    expires_s: int | None = None


class FileStore:
    """Store of files. Only the owner (digest of an API key) sees a file. All methods block on the disk."""

    def __init__(self, folder: Path, database: FilesDatabase, max_bytes: int) -> None:
        self._folder = folder
        self._database = database
        self.max_bytes = max_bytes
        self.prune()

    def begin(self, owner: str) -> FileWriter:
        """Create a file, which stays hidden until it is complete."""
        self.prune()
        file_id = new_id("file")
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, complete)"
                " VALUES (?, ?, '', '', 0, ?, 0)",
                (file_id, owner, int(time.time())),
            )
        return self.append(file_id)

    def append(self, file_id: str) -> FileWriter:
        """Open an unfinished file to append to it."""
        path = self.path(file_id)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return FileWriter(self, file_id, os.fdopen(descriptor, "wb", buffering=0))

    def path(self, file_id: str) -> Path:
        """Return the path of a file's contents. Check an ID from a client with `get` first: it could be any path."""
        return self._folder / file_id

    def reserve(self, file_id: str, size: int) -> None:
        """Reserve `size` bytes for a file. Raises DiskSpaceError if all files together would be too large."""
        with self._database.transaction() as connection:
            other_bytes = connection.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE id != ?", (file_id,))
            free = self.max_bytes - other_bytes.fetchone()[0]
            if size > free:
                raise DiskSpaceError(
                    f"All files together must have at most {self.max_bytes // MB} MB (setting files_mb): delete some.",
                    needed=size,
                    free=max(free, 0),
                )
            connection.execute("UPDATE files SET bytes = ? WHERE id = ?", (size, file_id))

    def complete(self, file_id: str, label: FileMetadata) -> FileObject:
        with self._database.transaction() as connection:
            return complete_file(connection, file_id, label)

    def discard(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)  # delete contents first, so that none remain without a row
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def get(self, owner: str, file_id: str) -> FileObject:
        """Return a file. Raises NotFoundError."""
        query = f"SELECT {_COLUMNS} FROM complete_files WHERE owner = ? AND id = ?"
        return FileObject(*only(self._database.rows(query, owner, file_id), file_id))

    def page(self, owner: str, wanted: Page, purpose: str | None) -> tuple[list[FileObject], bool]:
        """Return one page, optionally of one purpose, and whether more follow. Raises NotFoundError."""
        where = {"owner = ?": owner, **({} if purpose is None else {"purpose = ?": purpose})}
        select = f"SELECT {_COLUMNS} FROM complete_files"
        return self._database.page(select, wanted, where, lambda row: FileObject(*row))

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises NotFoundError, and InvalidRequestError while a batch reads the file."""
        self.get(owner, file_id)
        with self._database.transaction() as connection:
            reader = connection.execute("SELECT id FROM batches WHERE input_id = ? AND active", (file_id,)).fetchone()
            if reader is not None:
                raise InvalidRequestError(f"The batch {reader[0]} reads this file. Cancel it first.", param="file_id")
            self.path(file_id).unlink(missing_ok=True)
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def prune(self) -> None:
        """Delete expired files and abandoned uploads, except files that active batches need."""
        now = int(time.time())
        query = (
            "SELECT id FROM files WHERE (expires_at <= ? OR NOT complete AND created_at < ?) AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE active AND files.id IN (input_id, output_id, error_id))"
        )
        for (file_id,) in self._database.rows(query, now, now - _UNFINISHED_S):
            self.discard(file_id)


class FileWriter:
    """Writer that appends to a file. Call `close` at the end, then the store's `complete` or `discard`."""

    def __init__(self, store: FileStore, file_id: str, file: FileIO) -> None:
        self.id = file_id
        self._store = store
        self._file = file
        self.size = file.seek(0, os.SEEK_END)

    def write(self, data: bytes) -> None:
        """Write all of `data` or nothing. Written data survives the end of this process. Raises DiskSpaceError."""
        self._store.reserve(self.id, self.size + len(data))
        try:
            written = self._file.write(data)
        except OSError as error:
            raise DiskSpaceError(f"The file cannot be written: {error.strerror}.") from error
        if written != len(data):
            self._file.truncate(self.size)
            raise DiskSpaceError("The file cannot be written: the disk is full.")
        self.size += written

    def close(self) -> None:
        self._file.close()


def complete_file(connection: sqlite3.Connection, file_id: str, label: FileMetadata) -> FileObject:
    """Publish a file to its owner, in the caller's transaction."""
    expires_at = None if label.expires_s is None else int(time.time()) + label.expires_s
    connection.execute(
        "UPDATE files SET bytes = ?, filename = ?, purpose = ?, expires_at = ?, complete = 1 WHERE id = ?",
        (label.size, label.filename, label.purpose, expires_at, file_id),
    )
    return FileObject(*connection.execute(f"SELECT {_COLUMNS} FROM files WHERE id = ?", (file_id,)).fetchone())
