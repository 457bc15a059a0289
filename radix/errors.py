"""The one error tree of the project. Misuse raises; shortage is a value (`None`).

Knows nothing of what raises: each class says what was asked, what was there and what to do.

    RadixrtError
      CacheError                  misuse of the cache
        ClosedTable               a table or pin used after it was closed
        DoubleRelease             a page given back more often than it was taken, or no page at all
        LiveTables                a reset while tables, pins or copies live
        InvalidTokens             token ids that are no ids (also a ValueError)
        BrokenInvariant           found by `check()`: a bug in the cache, or memory written from outside
"""

from __future__ import annotations


class RadixrtError(Exception):
    """Base of every error this project raises on purpose."""


class CacheError(RadixrtError):
    """The cache was asked for something that has no meaning."""


class ClosedTable(CacheError):
    """A table or pin was used or closed after its end, or belongs to another cache."""


class DoubleRelease(CacheError):
    """A page was released (or retained) that its holder did not hold."""


class LiveTables(CacheError):
    """`reset` refused: something still reads or writes pages."""


class InvalidTokens(CacheError, ValueError):
    """Token ids are a one-dimensional sequence of integers in `[0, 2**31)`."""


class BrokenInvariant(CacheError):
    """`check()` found the state inconsistent; the message names the invariant and the ids."""


def require(holds: bool, broken: str) -> None:  # noqa: FBT001  # reads as a sentence
    """Raise `BrokenInvariant(broken)` unless `holds`."""
    if not holds:
        raise BrokenInvariant(broken)
