"""What an engine is told once, at its start: pool size, step limits, seed. Knows nothing of requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from radixrt.radix import POLICIES

from .checks import instance, integer, number, optional_integer, refuse
from .errors import InvalidRequest

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MAX = 2**31 - 1
_LEAST = {
    "page_size": 1,
    "token_budget": 1,
    "max_running": 1,
    "max_bypass": 0,
    "admission_window": 1,
    "keep_finished": 0,
    "finished_ttl": 0,
    "seed": -_MAX,
}

Swap = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, resolved once.

    `token_budget` bounds the rows one step computes (rows shared by several requests count once); `prefill_chunk`
    bounds the prompt rows one request adds to a step (None: the budget alone); `max_running` bounds the requests that
    are started (choices and forks of running ones go beyond it). `max_bypass`: so many later requests may be started
    before an earlier one, then it goes first. Of those that wait, the `admission_window` oldest are compared a step.
    `kv_memory` (bytes or "512MiB") or `num_pages` sizes the pool, of which pins may hold the share `pin_budget`;
    `eviction` names what makes a cached page cold (docs/eviction.md). `host_memory` (bytes, "1GiB") or `num_host_pages`
    sizes a second pool, in host memory, for cached pages that would be evicted; `swap`: whether they move there and
    back "always", "never" or, "auto", where that takes no longer than to compute them. The last `keep_finished`
    requests that ended within `finished_ttl` steps can be forked. `poison` ruins freed pages and page tails, so that a
    stale read cannot go unseen; for tests. `record` takes the run's record: a file, or a function called per line.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_memory: int | str = "512MiB"
    token_budget: int = 512
    prefill_chunk: int | None = None
    max_running: int = 64
    max_bypass: int = 16
    admission_window: int = 256
    pin_budget: float = 0.5
    keep_finished: int = 1024
    finished_ttl: int = 100_000
    prefix_cache: bool = True
    eviction: str = "duel"
    seed: int = 0
    poison: bool = False
    num_host_pages: int | None = None
    host_memory: int | str = 0
    swap: Swap = "auto"
    record: str | Path | Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        for name, low in _LEAST.items():
            object.__setattr__(self, name, integer(name, getattr(self, name), low, _MAX))
        object.__setattr__(self, "pin_budget", number("pin_budget", self.pin_budget, 0, 1))
        for name, low in (("num_pages", 1), ("prefill_chunk", 1), ("num_host_pages", 0)):
            object.__setattr__(self, name, optional_integer(name, getattr(self, name), low, _MAX))
        if self.swap not in get_args(Swap):
            refuse("swap", self.swap, " or ".join(map(repr, get_args(Swap))))
        for name in ("prefix_cache", "poison"):
            instance(name, getattr(self, name), bool, "True or False")
        if instance("eviction", self.eviction, str, " or ".join(POLICIES)) not in POLICIES:
            refuse("eviction", self.eviction, " or ".join(POLICIES))
        if self.record is not None and not isinstance(self.record, (str, Path)) and not callable(self.record):
            refuse("record", self.record, "None, a path or a function that takes a line")
        parse_bytes("kv_memory", self.kv_memory)
        if self.host_memory != 0:
            parse_bytes("host_memory", self.host_memory)

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
        num_pages = parse_bytes("kv_memory", self.kv_memory) // page_bytes
        if not 1 <= num_pages <= _MAX:
            refuse("kv_memory", self.kv_memory, f"room for 1 to {_MAX} pages, which take {page_bytes} bytes each")
        return num_pages

    def host_pages_for(self, page_bytes: int) -> int:
        """Host pages of the pool when one page takes `page_bytes`."""
        if self.num_host_pages is not None:
            return self.num_host_pages
        return min(_MAX, parse_bytes("host_memory", self.host_memory) // page_bytes) if self.host_memory else 0


def parse_bytes(field: str, value: int | str) -> int:
    """`512MiB`, `2 GB` or a plain number as bytes; InvalidRequest where it is neither."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        refuse(field, value, 'a positive number of bytes or a text like "512MiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])
