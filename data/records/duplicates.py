"""Pictures that come twice, found in one pass whose memory does not grow with their number.

LAION-COCO holds many copies of one picture; a drafter trained on them, or a hold-out that shares them, measures memory
instead of prediction. Hashes of the bytes lie in an SQLite file, so a stopped pass goes on where it stopped.

One process writes the file, and what is read is finished. The lock is `core/locks.py`'s, which waits as long as the
other process works: SQLite's own gives up.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ...core.errors import UserError, encodable
from ...core.locks import locked

_COMMIT_EVERY = 10_000  # items between two commits; a stopped pass loses no more
_TABLES = """
    CREATE TABLE IF NOT EXISTS images (sha256 BLOB PRIMARY KEY, number INTEGER NOT NULL, place TEXT) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS duplicates (number INTEGER PRIMARY KEY, first TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


def find_duplicates(items: Iterable[tuple[int, str, bytes]], database: Path) -> int:
    """Note in `database` which items have the bytes of an earlier one; the first keeps its place.

    Args:
        items: (number, file and place, encoded picture), numbers rising. After a stop, from `next_number(database)`
            on; from the beginning is right too, only slower. Once the pass is finished they are not looked at.

    Returns:
        How many duplicates there are.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(_lock(database)), _told(database), closing(_connected(database)) as connection:
        connection.executescript(_TABLES)
        if not _state(connection, "finished"):
            last = -1
            for count, (number, place, image) in enumerate(items, 1):
                assert number > last, f"number {number} after {last}"
                last = number
                _note(connection, number, place, hashlib.sha256(image).digest())
                if count % _COMMIT_EVERY == 0:
                    _commit(connection, "next", number + 1)
            _commit(connection, "finished", 1)
        return connection.execute("SELECT count(*) FROM duplicates").fetchone()[0]


def next_number(database: Path) -> int:
    """The number that an unfinished pass goes on from; 0 where there is none."""
    if not database.is_file():
        return 0
    with locked(_lock(database)), _told(database), closing(_connected(database)) as connection:
        connection.executescript(_TABLES)
        return _state(connection, "next")


class Duplicates:
    """A finished pass: `number in duplicates`. May be forked and pickled; each process opens the file for itself.

    Raises:
        UserError: there is no file, or its pass did not finish.
    """

    def __init__(self, database: Path):
        self.database = database
        self._connections: dict[int, sqlite3.Connection] = {}  # by process
        finished = False
        if database.is_file():
            with _told(database):
                tables = self._connection().execute("SELECT name FROM sqlite_master WHERE name = 'state'").fetchall()
                finished = bool(tables and _state(self._connection(), "finished"))
        if not finished:
            hint = "run the pass to its end; it goes on where it stopped"
            raise UserError("no finished search for duplicates", where=str(database), hint=hint)

    def __contains__(self, number: int) -> bool:
        return self.first(number) is not None

    def __len__(self) -> int:
        with _told(self.database):
            return self._connection().execute("SELECT count(*) FROM duplicates").fetchone()[0]

    def first(self, number: int) -> str | None:
        """File and place of the earlier item with the same bytes, or None."""
        with _told(self.database):
            row = self._connection().execute("SELECT first FROM duplicates WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]

    def _connection(self) -> sqlite3.Connection:
        """SQLite's connections must neither be used nor closed across a fork, so an inherited one stays untouched."""
        process = os.getpid()
        if process not in self._connections:
            self._connections[process] = _connected(self.database, "&mode=ro")
        return self._connections[process]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_connections": {}}


def _connected(database: Path, options: str = "") -> sqlite3.Connection:
    return sqlite3.connect(f"{database.resolve().as_uri()}?nolock=1{options}", uri=True)


def _lock(database: Path) -> Path:
    return database.with_name(f"{database.name}.lock")


def _note(connection: sqlite3.Connection, number: int, place: str, digest: bytes) -> None:
    """Recording an item twice has no effect."""
    if connection.execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?)", (digest, number, encodable(place))).rowcount:
        return
    earlier, first = connection.execute("SELECT number, place FROM images WHERE sha256 = ?", (digest,)).fetchone()
    if earlier != number:
        connection.execute("INSERT OR IGNORE INTO duplicates VALUES (?, ?)", (number, first))


def _state(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else row[0]


def _commit(connection: sqlite3.Connection, name: str, value: int) -> None:
    connection.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, value))
    connection.commit()


@contextmanager
def _told(database: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        hint = "delete the file and run the pass again; check that the disk is not full"
        raise UserError(f"cannot use the database of duplicates: {error}", where=str(database), hint=hint) from error
