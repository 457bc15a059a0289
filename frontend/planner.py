"""How many sessions a KV pool holds: `plan`, and `CapacityPlan`, which says it for each way to give out memory.

Knows a model by the width of its KV alone, and requests by their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size

from rich.console import Console
from rich.table import Table

from radixrt.runtime import EngineConfig, InvalidRequest, KVGeometry, checks

from .capacity import Pool, Way
from .lengths import Lengths, Pairs
from .terminal import bytes_text

__all__ = ["CapacityPlan", "Way", "plan"]

_MAX_LEN = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """What `pool` holds of requests like `given`, which do not count the prefix that they may share.

    `ways` are, in order: reservation of the maximum length; of the prompt and the next power of two of the output;
    pages; and, with a shared prefix, pages that all sessions share.
    """

    model: str
    dtype: str
    token_bytes: int
    pool: Pool
    given: Lengths = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.lengths):
            pool, shortest = self.pool, (self.given.prompt + self.given.output).min() + self.pool.shared_prefix
            raise InvalidRequest(
                f"lengths: the shortest request has {shortest:,} tokens, its prefix included, max_len is "
                f"{pool.max_len:,} and the pool holds {pool.num_slots:,}; give more kv_memory or a larger max_len"
            )

    @property
    def lengths(self) -> Lengths:
        """What the plan counts with: all that is given but requests longer than the maximum length or the pool."""
        return self.pool.fitting(self.given)

    @property
    def num_left_out(self) -> int:
        return len(self.given) - len(self.lengths)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.pool.page_size

    @property
    def kv_bytes(self) -> int:
        """Of the whole pool."""
        return self.page_bytes * self.pool.num_pages

    @property
    def ways(self) -> tuple[Way, ...]:
        return self.pool.ways(self.lengths)

    def at(self, kv_memory: int | str) -> CapacityPlan:
        """The same requests with a pool of another size."""
        num_pages = EngineConfig(kv_memory=kv_memory).pages_for(self.page_bytes)
        return replace(self, pool=replace(self.pool, num_pages=num_pages))

    def table(self) -> Table:
        """A row for each way, for a terminal of 80 columns."""
        table = Table("", box=None, padding=(0, 0, 0, 3), show_edge=False)
        for heading in ("sessions\nat once", "KV a\nsession", "pages a\nsession", "live share\nof the pool"):
            table.add_column(heading, justify="right")
        for way in self.ways:
            table.add_row(
                way.name,
                _count(way.sessions),
                bytes_text(way.session_pages * self.page_bytes),
                _count(way.session_pages),
                f"{way.live_share:.1%}",
            )
        return table

    def summary(self) -> str:
        """What the table stands on, in four lines."""
        lengths, pool = self.lengths, self.pool
        shared = f"{pool.shared_prefix:,} shared + " if pool.shared_prefix else ""
        left_out = f"; {_num(self.num_left_out, 'longer one')} left out" if self.num_left_out else ""
        return (
            f"{self.model}, {self.dtype}: {self.token_bytes:,} bytes a token, "
            f"{bytes_text(self.page_bytes)} a page of {pool.page_size}\n"
            f"pool of {bytes_text(self.kv_bytes)}: {pool.num_pages:,} pages, {pool.num_slots:,} tokens\n"
            f"{_num(len(lengths), 'request')} of up to {pool.max_len:,} tokens{left_out}\n"
            f"on average {shared}{lengths.prompt.mean():,.0f} prompt + {lengths.output.mean():,.0f} output tokens"
        )

    def __str__(self) -> str:
        text = StringIO()
        console = Console(file=text, width=get_terminal_size().columns, highlight=False)
        console.print(f"{self.summary()}\n", soft_wrap=True)
        console.print(self.table())
        return text.getvalue().rstrip("\n")

    def plot(self, path: str | Path) -> None:
        """Draw sessions over the pool's memory, and who takes the pool, into an image of the kind its name ends in.

        InvalidRequest where matplotlib is not installed (the extra `plot`), or draws no such kind.
        """
        from .chart import draw

        draw(self, Path(path))


def plan(
    model: str | Path | KVGeometry = "smollm2-135m",
    *,
    lengths: str | Path | tuple[float, float] | Pairs,
    kv_memory: int | str = "512MiB",
    dtype: str = "float32",
    page_size: int = 16,
    max_len: int | None = None,
    shared_prefix: int = 0,
) -> CapacityPlan:
    """How many requests a pool of `kv_memory` runs at once, by each way to give it out. No weights are read.

    `lengths`: a file (CSV with a header that names prompt and output lengths, or lines of "prompt,output", gzipped or
    not), a list of (prompt, output), or one such pair for requests that are all alike. Averages say less than a
    list: long outputs stay longer, and so are more of what runs than of what comes.
    `shared_prefix` tokens, the same in all, stand before every prompt; lengths do not count them. `max_len` is what
    a reservation without paging must hold, by default the model's context; longer requests are left out.

    What a session holds is counted exactly, what lies free between two admissions is estimated: within 5 % of the
    engine's sessions and shares (`benchmarks/memory.py`). InvalidRequest or ModelError say what is wrong, OSError
    which file.
    """
    geometry = model if isinstance(model, KVGeometry) else KVGeometry.of(model)
    token_bytes = geometry.token_bytes(dtype)
    config = EngineConfig(page_size=page_size, kv_memory=kv_memory)
    if max_len is None and geometry.context_len is None:
        raise InvalidRequest("max_len: none given, and the model's context is not known; give the longest request")
    pool = Pool(
        num_pages=config.pages_for(token_bytes * config.page_size),
        page_size=config.page_size,
        max_len=checks.integer("max_len", geometry.context_len if max_len is None else max_len, 2, _MAX_LEN),
        shared_prefix=checks.integer("shared_prefix", shared_prefix, 0, _MAX_LEN),
    )
    return CapacityPlan(
        model=str(model) if not isinstance(model, KVGeometry) else str(geometry),
        dtype=dtype,
        token_bytes=token_bytes,
        pool=pool,
        given=Lengths.of(lengths),
    )


def _num(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _count(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
