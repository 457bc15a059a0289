"""How long requests are: prompt and output tokens of each, as numbers or from a file.

Knows nothing of models or memory.
"""

from __future__ import annotations

import csv
import gzip
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from radixrt.runtime import InvalidRequest

IntArray = npt.NDArray[np.int64]
Pairs = Sequence[Sequence[float]] | npt.NDArray[np.number]

MAX_TOKENS = 2**24  # of a prompt or an output; the planner has an array of as many entries
# What the columns are called in traces that are around, in lower case and without underscores.
_PROMPT = ("prompt", "promptlen", "prompttokens", "input", "inputlen", "inputlength", "inputtokens", "contexttokens")
_OUTPUT = ("output", "outputlen", "outputtokens", "outputlength", "completiontokens", "generatedtokens")
_FORMS = 'lines of "prompt,output" in tokens, or a CSV file whose first line names such columns'


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Request i comes with `prompt[i]` tokens and generates `output[i]`, both at least 1.

    Traces hold requests of no output; they are counted as one token, which takes no room either.
    """

    prompt: IntArray  # [n]
    output: IntArray  # [n]

    def __len__(self) -> int:
        return len(self.prompt)

    def where(self, kept: npt.NDArray[np.bool_]) -> Lengths:
        """The requests that `kept` marks."""
        return Lengths(self.prompt[kept], self.output[kept])

    @classmethod
    def of(cls, given: str | Path | tuple[float, float] | Pairs) -> Lengths:
        """A file's lengths, a list of (prompt, output), or one such pair for requests that are all alike.

        Fractions are rounded. InvalidRequest says which entry or line is wrong; OSError for a file that cannot be read.
        """
        if isinstance(given, (str, Path)):
            return cls.read(Path(given))
        entries = given if isinstance(given, (Sequence, np.ndarray)) else None
        if entries is None or not len(entries):
            raise InvalidRequest("lengths: a file, a pair (prompt, output) or a list of such pairs is needed")
        if len(entries) == 2 and all(isinstance(value, numbers.Real) for value in entries):
            entries = [entries]  # type: ignore[list-item]
        return _checked((f"lengths[{i}]", pair) for i, pair in enumerate(entries))

    @classmethod
    def read(cls, path: Path) -> Lengths:
        """The file's, which may be gzipped; empty lines and columns that are neither length do not count."""
        try:
            with _open(path) as lines:
                return _checked(_rows(path, lines))
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as error:
            raise InvalidRequest(f"lengths: {path} is no text ({error}); {_FORMS} are needed") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, lines: TextIO) -> Iterable[tuple[str, Sequence[str]]]:
    """(where it stands, the two fields) for each request."""
    reader = csv.reader(lines)
    columns: tuple[int, int] | None = None
    for fields in reader:
        if not any(field.strip() for field in fields):
            continue
        where = f"lengths: {path}, line {reader.line_num}"
        if columns is None and not _is_number(fields[0]):
            columns = _columns(where, fields)
            continue
        columns = columns or (0, 1)
        if columns == (0, 1) and len(fields) == 1:
            raise InvalidRequest(f"{where}: {fields[0][:40]!r} given; {_FORMS} are needed")
        if len(fields) <= max(columns):
            raise InvalidRequest(f"{where}: {len(fields)} columns given; the lengths are in column {max(columns) + 1}")
        yield where, [fields[column] for column in columns]


def _columns(where: str, header: list[str]) -> tuple[int, int]:
    """Where the lengths stand, by the names in the first line."""
    names = [name.strip().lower().replace("_", "").replace(" ", "") for name in header]
    found = [next((i for i, name in enumerate(names) if name in known), None) for known in (_PROMPT, _OUTPUT)]
    if found[0] is None or found[1] is None:
        missing = " and ".join(what for what, at in zip(("prompt", "output"), found, strict=True) if at is None)
        shown = ",".join(header)[:120]
        raise InvalidRequest(
            f"{where}: no column for {missing} lengths in {shown!r}; name them prompt_len and output_len, or give "
            'lines of "prompt,output" without a header'
        )
    return found[0], found[1]


def _checked(entries: Iterable[tuple[str, object]]) -> Lengths:
    """The entries as arrays, each checked; the first wrong one is named."""
    pairs = [_pair(where, given) for where, given in entries]
    if not pairs:
        raise InvalidRequest(f"lengths: none given; {_FORMS} are needed")
    prompt, output = np.array(pairs, dtype=np.int64).T
    return Lengths(prompt, output)


def _pair(where: str, given: object) -> tuple[int, int]:
    if isinstance(given, str) or not isinstance(given, (Sequence, np.ndarray)) or len(given) != 2:
        raise InvalidRequest(f"{where}: a pair (prompt, output) is needed")
    return _tokens(where, "prompt", given[0], low=1), _tokens(where, "output", given[1], low=0)


def _tokens(where: str, what: str, given: object, *, low: int) -> int:
    """`given`, a number or its text, as a count of tokens, at least 1."""
    value = float(given) if isinstance(given, numbers.Real) or (isinstance(given, str) and _is_number(given)) else None
    if value is None or not low <= value <= MAX_TOKENS:
        shown = repr(given) if isinstance(given, (str, int, float)) else f"a {type(given).__name__}"
        raise InvalidRequest(f"{where}: {shown[:40]} {what} tokens given; allowed: a number in [{low}, {MAX_TOKENS}]")
    return max(1, round(value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
