"""One program over many rows: how many at once, results in order, and a file that a killed batch resumes from.

Knows nothing of states. Row i draws on branch i of the program's seed, whatever runs beside it and wherever it resumes.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import blake2b
from pathlib import Path
from threading import Event, Lock
from typing import Any, NoReturn, TextIO

from radixrt.runtime import InvalidRequest, checks

from .driver import Driver
from .scope import Failed, Ok
from .threads import run_threads

Row = Mapping[str, Any]
_BEGINNING = b'{"row": '  # of each line


class Journal:
    """The results so far: one JSON line for each row that succeeded, and a cut-off line of a killed writer removed."""

    def __init__(self, path: str | Path, rows: Sequence[Row], *, program: str) -> None:
        """InvalidRequest where the file is of other rows, another program or seed, or another batch has it open.

        So for arguments that another process would not know again.
        """
        self.values: dict[int, Any] = {}
        self._keys = [_key(program, number, row) for number, row in enumerate(rows)]
        self._path = Path(path)
        self._lock = Lock()
        with ExitStack() as stack:
            try:
                self._file: TextIO = stack.enter_context(self._path.open("a", encoding="utf-8"))
                flock(self._file, LOCK_EX | LOCK_NB)  # until it is closed, by whatever ends the process too
                whole = self._path.read_bytes()
                lines = whole[: whole.rfind(b"\n") + 1]
                for line in lines.splitlines():
                    self._read(line)
                if torn := whole[len(lines) :]:
                    if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
                        self._refuse(torn)
                    self._file.truncate(len(lines))
            except BlockingIOError as error:
                said = "another batch is at it, here or in another process; let that end, or name another file"
                raise InvalidRequest(f"resume: {self._path} is in use: {said}") from error
            except OSError as error:
                raise InvalidRequest(f"resume: {self._path} cannot be used: {error}") from error
            stack.pop_all()

    def add(self, number: int, value: Any) -> Any:
        """Keep a row's value; as JSON gives it back. InvalidRequest where it is none."""
        try:
            text = json.dumps({"row": number, "key": self._keys[number], "value": value})
        except (TypeError, ValueError) as error:
            shown = reprlib.repr(value)
            raise InvalidRequest(f"resume: row {number} returned {shown}, which JSON cannot hold: {error}") from error
        with self._lock:
            self._file.write(text + "\n")
            self._file.flush()  # a killed process loses nothing then
        return json.loads(text)["value"]

    def close(self) -> None:
        self._file.close()

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            number, key, value = entry["row"], entry["key"], entry["value"]
        except (ValueError, TypeError, KeyError):
            self._refuse(line)
        if not (isinstance(number, int) and 0 <= number < len(self._keys) and self._keys[number] == key):
            raise InvalidRequest(
                f"resume: row {number} of {self._path} is not of this batch: other rows, another program or another "
                "seed; name another file"
            )
        self.values[number] = value

    def _refuse(self, line: bytes) -> NoReturn:
        raise InvalidRequest(
            f"resume: {self._path} is no journal of a batch: it has {line[:80]!r}; name another file"
        ) from None


def rows_of(rows: Iterable[Row]) -> list[Row]:
    """The rows as a list. InvalidRequest for what is none, before any is run."""
    checks.instance("rows", rows, Iterable, "a list with a mapping of arguments by name for each run")
    listed = list(rows)
    for number, row in enumerate(listed):
        if not (isinstance(row, Mapping) and all(isinstance(name, str) for name in row)):
            checks.refuse(f"row {number}", row, "a mapping of arguments by name")
    return listed


def in_threads(
    driver: Driver, one: Callable[[int], Any], numbers: Sequence[int], *, concurrency: int, stop: Callable[[], None]
) -> dict[int, Ok[Any] | Failed]:
    """Run `one` on each number, so many at once; where this is interrupted, `stop` ends those that run or would."""
    results: dict[int, Ok[Any] | Failed] = {}
    left, lock = iter(numbers), Lock()
    broken: list[BaseException] = []
    is_over = Event()

    def work() -> None:
        while not is_over.is_set():
            with lock:
                number = next(left, None)
            if number is None:
                return
            try:
                results[number] = Ok(one(number))
            except Exception as error:
                results[number] = Failed(error)
            except BaseException as error:
                broken.append(error)
                cancel()

    def cancel() -> None:
        is_over.set()
        stop()

    run_threads(driver, [work] * min(concurrency, len(numbers)), cancel)
    if broken:
        raise broken[0]
    return results


async def in_tasks(
    one: Callable[[int], Awaitable[Any]], numbers: Sequence[int], *, concurrency: int
) -> dict[int, Ok[Any] | Failed]:
    """Run `one` on each number, so many at once."""
    results: dict[int, Ok[Any] | Failed] = {}
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            try:
                results[number] = Ok(await one(number))
            except Exception as error:
                results[number] = Failed(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(numbers))):
            group.create_task(work())
    return results


def _key(program: str, number: int, row: Row) -> str:
    """Tells rows apart, across processes."""

    def shown(value: object) -> str:
        if type(value).__repr__ is object.__repr__:
            raise InvalidRequest(
                f"resume: row {number} has {reprlib.repr(value)} among its arguments, which no other process would "
                "know again; give plain values, or what has a __repr__ of its own"
            )
        return repr(value)

    text = json.dumps([program, row], sort_keys=True, default=shown)
    return blake2b(text.encode(), digest_size=8).hexdigest()
