"""What an engine is told once, at its start: pool size, step limits, seed. Knows nothing of requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import InvalidRequest

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, resolved once.

    `token_budget` bounds the rows one step computes (rows shared by several requests count once); `prefill_chunk`
    bounds the prompt rows one request adds to a step (None: the budget alone); `max_running` bounds the requests that
    hold pages. `max_bypass`: so many later requests may be admitted before an earlier one, then it goes first.
    `kv_memory` (bytes or "512MiB") or `num_pages` sizes the pool. `poison` ruins freed pages and page tails, so that a
    stale read cannot go unseen; for tests. `record` takes the run's record: a file, or a function called per line.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_memory: int | str = "512MiB"
    token_budget: int = 512
    prefill_chunk: int | None = None
    max_running: int = 64
    max_bypass: int = 16
    prefix_cache: bool = True
    seed: int = 0
    poison: bool = False
    record: str | Path | Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "token_budget", "max_running"):
            _require_positive(name, getattr(self, name))
        for name in ("num_pages", "prefill_chunk"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not isinstance(self.max_bypass, int) or self.max_bypass < 0:
            raise InvalidRequest(f"max_bypass: {self.max_bypass!r} given, an integer of at least 0 is needed")
        if not isinstance(self.seed, int):
            raise InvalidRequest(f"seed: {self.seed!r} given, an integer is needed")
        parse_bytes(self.kv_memory)

    @classmethod
    def of(cls, settings: dict[str, Any]) -> EngineConfig:
        """The config of these settings; an unknown name raises InvalidRequest and lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise InvalidRequest(f"{name}: no such engine setting; known are {', '.join(known)}")
        return cls(**settings)

    def pages_for(self, page_bytes: int) -> int:
        """Pages of the pool when one page takes `page_bytes`."""
        if self.num_pages is not None:
            return self.num_pages
        memory = parse_bytes(self.kv_memory)
        if memory < page_bytes:
            raise InvalidRequest(
                f"kv_memory: {self.kv_memory!r} given, one page of this model takes {page_bytes} bytes"
            )
        return memory // page_bytes


def parse_bytes(value: int | str) -> int:
    """`512MiB`, `2 GB` or a plain number as bytes; InvalidRequest where it is neither."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise InvalidRequest(
            f'kv_memory: {value!r} given, a positive number of bytes or a text like "512MiB" is needed'
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name}: {value!r} given, an integer of at least 1 is needed")
