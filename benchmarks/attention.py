"""What one layer's attention costs: paged and tree against contiguous caches, in decode steps and in chunks of prompt.

Plans and backends of radixrt.kernels alone, no model. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report, Timing, Variant, number, time_rounds  # before torch

# isort: split
import torch
from _limits import Limits, Machine
from _pools import NEVER, Case, Shape, Way, contiguous, gather, paged

from radixrt.kernels.backend import AttentionBackend
from radixrt.kernels.cpu.native import NativeAttention, build
from radixrt.kernels.cpu.torch_attention import TorchAttention

SHAPES = (
    Shape(name="SmolLM2", num_heads=9, num_kv_heads=3, dim=64),
    Shape(name="Llama-8B", num_heads=32, num_kv_heads=8, dim=128),
)
DTYPES = (torch.float32, torch.bfloat16)
CHUNKS = ((1, 2048, 128), (8, 2048, 16), (8, 512, 128), (1, 0, 512))  # sequences, cached before, rows of each
CONTIGUOUS, GATHER, TORCH = "contiguous", "gather", "torch tree"
PAGED, IN_ORDER, ALONE, TREE, EXACT = "paged", "paged, in order", "by sequence", "tree", "tree, exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One case measured in several runs; every number is the median of the runs'."""

    case: Case
    ways: Mapping[str, Way]
    runs: list[tuple[dict[str, Timing], Limits]]

    def timing(self, name: str) -> Timing:
        return Timing(tuple(seconds for times, _ in self.runs for seconds in times[name].seconds))

    def seconds(self, name: str) -> float:
        """Of one layer."""
        return median(times[name].median for times, _ in self.runs)

    def ratio(self, name: str, other: str) -> float:
        """How many times as long as `other` this takes."""
        return median(times[name].ratio(times[other]) for times, _ in self.runs)

    def share(self, name: str) -> float:
        """The least time that the machine allows over the time taken, in percent; bytes count as often as they lie."""
        needs = {"num_bytes": self.ways[name].kv_bytes, "flops": self.case.flops}
        return median(100 * limits.seconds(**needs) / times[name].median for times, limits in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measures cases and prints them."""

    report: Report
    machine: Machine
    runs: int
    rounds: int
    native: AttentionBackend | None

    def measure(self, case: Case, makers: Mapping[str, Callable[[int], Way]], total: int) -> Cell:
        """Several runs over KV of `total` bytes, an equal part for each way."""
        ways = {name: make(total // len(makers)) for name, make in makers.items()}
        runs = []
        for _ in range(self.runs):
            limits = self.machine.limits(case.dtype)  # of the same minute as what is compared with them
            runs.append((self.time(ways), limits))
        return Cell(case=case, ways=ways, runs=runs)

    def time(self, ways: Mapping[str, Way]) -> dict[str, Timing]:
        """Seconds of a layer, each way in turn within a round."""
        variants = {name: Variant(run=way.run_all, operations=len(way.layers)) for name, way in ways.items()}
        return time_rounds(variants, rounds=self.rounds, clock=self.report.options.clock)

    def show(self, title: str, cell: Cell) -> None:
        """The time of each way, beside its share of the limit."""
        name = f"{cell.case.shape.name} {str(cell.case.dtype).removeprefix('torch.')}"
        self.report.section(f"{name}, {title}", "of the limit")
        for way in cell.ways:
            share = f"{cell.share(way):.0f} %"
            self.report.add(way, cell.seconds(way) * 1e6, "us", baseline=share, timing=cell.timing(way))
        layers = ", ".join(f"{len(way.layers)} x {way.kv_bytes / 1e6:.3g}" for way in cell.ways.values())
        self.report.note(f"limits {'; '.join(str(limits) for _, limits in cell.runs)}")
        self.report.note(f"KV, layers x MB: {layers}")

    def goal(self, cell: Cell, name: str, other: str, goal: Goal | None) -> None:
        """The ratio of two ways: as speed-up where the goal is a floor, else as time."""
        if goal is not None and goal.is_floor:
            label, value = f"{name} over {other}", cell.ratio(other, name)
        else:
            label, value = f"{name} / {other}", cell.ratio(name, other)
        self.report.add(label, value, "x", goal=goal, timing=cell.timing(name), against=cell.timing(other))

    def decode(self, case: Case) -> None:
        """One row of each sequence. All KV together is twice what the cache holds, so that a round evicts it."""
        shared, apart = (case.tables(shared=shared) for shared in (True, False))
        in_order = case.tables(shared=False, in_order=True)
        torch_backend, native = TorchAttention(), self.native
        cost = torch_backend.sharing_cost
        makers: dict[str, Callable[[int], Way]] = {
            CONTIGUOUS: lambda budget: contiguous(case, budget),
            GATHER: lambda budget: gather(case, budget, shared),
            TORCH: lambda budget: paged(torch_backend, case, budget, shared, sharing_cost=cost),
        }
        if native is not None:
            cost = native.sharing_cost
            makers |= {
                PAGED: lambda budget: paged(native, case, budget, apart, sharing_cost=NEVER),
                IN_ORDER: lambda budget: paged(native, case, budget, in_order, sharing_cost=NEVER),
                ALONE: lambda budget: paged(native, case, budget, shared, sharing_cost=NEVER),
                TREE: lambda budget: paged(native, case, budget, shared, sharing_cost=cost),
                EXACT: lambda budget: paged(native, case, budget, shared, sharing_cost=cost, exact=True),
            }
        cell = self.measure(case, makers, 2 * self.machine.cache_bytes)
        self.show(f"{case.batch} x ({case.prefix:,} + {case.tail})", cell)
        is_large = case.batch == 32 and case.prefix == 2048
        self.goal(cell, TORCH, GATHER, Goal.at_least(5) if is_large and case.tail == 32 else None)
        if native is None:
            return
        is_float32 = case.dtype == torch.float32
        self.goal(cell, PAGED, CONTIGUOUS, Goal.at_most(0.8) if case.batch == 1 else None)
        self.goal(cell, ALONE, CONTIGUOUS, Goal.at_most(0.8 if case.batch == 1 else 0.45))
        self.goal(cell, PAGED, IN_ORDER, Goal.at_most(1.1 if is_float32 else 1.15))
        self.goal(cell, TREE, GATHER, Goal.at_least(10) if is_large else None)
        self.goal(cell, TREE, CONTIGUOUS, Goal.at_least(4.5) if is_large else None)
        self.goal(cell, TREE, ALONE, Goal.at_least((1.2 if is_float32 else 1.1) if is_large else 0.95))
        self.goal(cell, EXACT, TREE, Goal.at_most(1.1))
        floor = 40 if case.batch == 1 else {32: 60, 128: 50}[case.tail]
        has_floor = case.prefix == 2048 and case.batch in (1, 32)
        share, goal = cell.share(TREE), Goal.at_least(floor) if has_floor else None
        self.report.add("tree, share of the limit", share, "%", goal=goal)

    def extend(self, case: Case) -> None:
        """A chunk of each sequence's prompt; nothing is shared. Products take the time, so KV may lie in the cache."""
        tables = case.tables(shared=False)
        makers: dict[str, Callable[[int], Way]] = {
            CONTIGUOUS: lambda budget: contiguous(case, budget),
            "torch": lambda budget: paged(TorchAttention(), case, budget, tables, sharing_cost=NEVER),
        }
        if (native := self.native) is not None:
            makers |= {
                PAGED: lambda budget: paged(native, case, budget, tables, sharing_cost=NEVER),
                "paged, exact": lambda budget: paged(native, case, budget, tables, sharing_cost=NEVER, exact=True),
            }
        cell = self.measure(case, makers, self.machine.cache_bytes // 4)
        self.show(f"{case.batch} chunks of {case.own_rows} after {case.prefix:,}", cell)
        if native is not None:
            self.goal(cell, PAGED, CONTIGUOUS, Goal.at_most(0.85))
            self.goal(cell, "paged, exact", PAGED, Goal.at_most(1.1))

    def sweep(self, backend: AttentionBackend, shape: Shape, dtype: torch.dtype, *, exact: bool) -> None:
        """Plans that share one prefix against plans that share nothing, and from which saving on that never loses 2 %.

        A prefix of n tokens with r readers saves (r - 1) * n, which is what `sharing_cost` bounds from below.
        """
        ratios: list[tuple[int, float]] = []
        kind = f"{shape.name} {str(dtype).removeprefix('torch.')}, {backend.name}{', exact' if exact else ''}"
        self.report.section(f"{kind}: tree / by sequence", "tokens saved")
        for readers, prefix in product((2, 3, 4, 8, 16, 32), (256, 512, 1024, 2048)):
            case = Case(shape=shape, dtype=dtype, batch=readers, prefix=prefix, tail=32)
            tables, saved = case.tables(shared=True), (readers - 1) * prefix
            times = self.time(
                {
                    name: paged(backend, case, self.machine.cache_bytes, tables, sharing_cost=cost, exact=exact)
                    for name, cost in ((TREE, 0), (ALONE, NEVER))
                }
            )
            ratios.append((saved, times[TREE].ratio(times[ALONE])))
            self.report.add(f"{readers} readers of {prefix:,}", ratios[-1][1], "x", baseline=f"{saved:,}")
        losing = max((saved for saved, ratio in ratios if ratio > 1.02), default=0)
        found = min((saved for saved, _ in ratios if saved > losing), default=None)
        shown = "never faster for certain" if found is None else f"never slower where {found:,} or more are saved"
        self.report.note(f"{shown}; sharing_cost is {backend.sharing_cost:,}")


def decode_cases(*, quick: bool) -> Iterator[Case]:
    for shape, dtype in product(SHAPES, DTYPES):
        batches, prefixes, tails = ((1, 32), (2048,), (32,)) if quick else ((1, 8, 32), (512, 2048), (32, 128))
        if quick and shape is not SHAPES[0]:
            continue
        for batch, prefix, tail in product(batches, prefixes, tails):
            yield Case(shape=shape, dtype=dtype, batch=batch, prefix=prefix, tail=tail)


def chunk_cases(*, quick: bool) -> Iterator[Case]:
    for shape, dtype in product(SHAPES[:1] if quick else SHAPES, DTYPES):
        for batch, prefix, rows in CHUNKS[:1] if quick else CHUNKS:
            yield Case(shape=shape, dtype=dtype, batch=batch, prefix=prefix, tail=rows, own_rows=rows)


def main() -> int:
    options = Options.parse(
        __doc__, clock="wall", runs=True, sweep="find from which sharing pays, for both CPU backends"
    )
    built, runs = build(), options.runs or (1 if options.quick else 3)
    native = NativeAttention(built.library) if built.library is not None else None
    bench = Bench(
        report=Report(options=options),
        machine=Machine(options.clock),
        runs=runs,
        rounds=3 if options.quick else 7,
        native=native,
    )
    print(f"{torch.get_num_threads()} threads; medians of {runs} runs of {bench.rounds} rounds; native: {built.reason}")
    print(f"last-level cache {number(bench.machine.cache_bytes / 1e6)} MB; the KV of a round is twice that")
    with torch.inference_mode():
        if options.sweep:
            for backend, shape, dtype, exact in product((native, TorchAttention()), SHAPES, DTYPES, (True, False)):
                if backend is not None and (shape is SHAPES[0] or not options.quick):
                    bench.sweep(backend, shape, dtype, exact=exact)
            return bench.report.finish()
        for case in decode_cases(quick=options.quick):
            bench.decode(case)
        for case in chunk_cases(quick=options.quick):
            bench.extend(case)
    return bench.report.finish()


if __name__ == "__main__":
    sys.exit(main())
