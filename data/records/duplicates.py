"""Pictures that come twice, found in one pass whose memory does not grow with their number.

LAION-COCO holds many copies of one picture; a drafter trained on them, or a hold-out that shares them, measures memory
instead of prediction. Hashes of the bytes lie in an SQLite file, so a stopped pass goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ...core.errors import UserError, encodable

_COMMIT_EVERY = 10_000  # items between two commits; a stopped pass loses no more
_WAIT_S = 7 * 24 * 3600.0  # for another process that looks through the same pictures
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
    with _connected(database) as connection:
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
    with _connected(database) as connection:
        return _state(connection, "next")


class Duplicates:
    """A finished pass: `number in duplicates`. May be forked and pickled: the file is opened anew for each question.

    Raises:
        UserError: there is no file, or its pass did not finish.
    """

    def __init__(self, database: Path):
        self.database = database
        finished = 0
        if database.is_file():
            with _connected(database) as connection:
                finished = _state(connection, "finished")
        if not finished:
            hint = "run the pass to its end; it goes on where it stopped"
            raise UserError("no finished search for duplicates", where=str(database), hint=hint)

    def __contains__(self, number: int) -> bool:
        return self.first(number) is not None

    def first(self, number: int) -> str | None:
        """File and place of the earlier item with the same bytes, or None."""
        with _connected(self.database) as connection:
            row = connection.execute("SELECT first FROM duplicates WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]


@contextmanager
def _connected(database: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(database, timeout=_WAIT_S)) as connection:
            connection.executescript(_TABLES)
            yield connection
    except sqlite3.DatabaseError as error:
        hint = "delete the file and run the pass again; check that the disk is not full"
        raise UserError(f"cannot use the database of duplicates: {error}", where=str(database), hint=hint) from error


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
