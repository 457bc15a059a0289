"""How every benchmark measures and reports: interleaved rounds, medians, goals, facts about the machine.

Knows nothing of what is measured. Import it before torch: libgomp reads OMP_WAIT_POLICY once, when it is loaded, and
threads that spin while they wait make a region of two threads up to 700 times slower on a machine that is busy.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CLOCKS: dict[str, Callable[[], float]] = {"wall": perf_counter, "cpu": process_time}
_PACKAGES = ("radixrt", "numpy", "sortedcontainers", "torch", "transformers")
_ROW = "  {:<27.27} {:>17} {:>15} {:>9} {:>6}"  # 80 columns


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One thing to time. `prepare` runs untimed before each round and makes the argument of `run`, which is timed."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = _nothing
    operations: int = 1  # that one run does: times are per operation


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per operation, one for each round."""

    seconds: tuple[float, ...]

    @property
    def min(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return median(self.seconds)

    def ratio(self, other: Timing) -> float:
        """How many times as long as `other` this takes: the median over rounds, which drifts of the machine leave."""
        return median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def time_rounds(
    variants: Mapping[str, Variant], *, clock: Callable[[], float], rounds: int, warmups: int = 1
) -> dict[str, Timing]:
    """Time the variants in `rounds` rounds, each of them once a round, after `warmups` rounds that do not count.

    Variants take turns because what disturbs one, a noisy neighbour or a clock that slows down, then disturbs all.
    The garbage collector stays off; between rounds it runs where a variant prepares (and thus discards) state.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(-warmups, rounds):
            for name, variant in variants.items():
                argument = variant.prepare()
                if variant.prepare is not _nothing:
                    gc.collect()
                start = clock()
                variant.run(argument)
                elapsed = clock() - start
                del argument
                if number >= 0:
                    seconds[name].append(elapsed / variant.operations)
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def keep_memory() -> None:
    """Let the process keep what it frees (glibc only), as one does that has run for a while.

    Otherwise every large array comes from the kernel anew, and page faults are half of what is timed.
    """
    trim_threshold, mmap_threshold, huge = -1, -3, 1 << 30
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(trim_threshold, huge)
    mallopt(mmap_threshold, huge)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a value keeps or misses."""

    bound: float
    is_floor: bool

    @classmethod
    def at_least(cls, bound: float) -> Goal:
        return cls(bound, is_floor=True)

    @classmethod
    def at_most(cls, bound: float) -> Goal:
        return cls(bound, is_floor=False)

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_floor else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.is_floor else '<='} {number(self.bound)}"


@dataclass(slots=True, kw_only=True)
class Report:
    """The table, printed row by row as values come in, and the same as JSON at the end."""

    options: Options
    cells: list[dict[str, Any]] = field(default_factory=list)
    _section: str = ""

    def section(self, title: str, baseline: str = "") -> None:
        """Begin a part of the table; `baseline` heads the column of what a value is compared with."""
        self._section = title
        print(f"\n{title}")
        print(_ROW.format("", "median", baseline, "goal", "").rstrip(), flush=True)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        goal: Goal | None = None,
        baseline: str = "",
        timing: Timing | None = None,
        against: Timing | None = None,
    ) -> None:
        """Print one cell beside its goal and baseline, and keep it with the times of both."""
        met = goal.is_met(value) if goal is not None else None
        verdict = "" if met is None else "met" if met else "MISSED"
        shown = f"{number(value)} {unit}".rstrip()
        print(_ROW.format(name, shown, baseline, str(goal or ""), verdict).rstrip(), flush=True)
        cell = {"section": self._section, "name": name, "value": value, "unit": unit, "baseline": baseline}
        cell |= {"goal": str(goal) if goal else None, "met": met}
        for key, times in (("times", timing), ("baseline_times", against)):
            if times is not None:
                cell[key] = {"min_s": times.min, "median_s": times.median, "rounds": len(times.seconds)}
        self.cells.append(cell)

    def note(self, text: str) -> None:
        """A line about the section above."""
        print(f"  {text}", flush=True)

    def finish(self) -> int:
        """Count the goals, write the JSON, and return the exit status: 1 where `--strict` finds one missed, else 0."""
        missed = [f"{cell['section']}: {cell['name']}" for cell in self.cells if cell["met"] is False]
        print(f"\n{sum(cell['met'] is True for cell in self.cells)} goals met, {len(missed)} missed")
        for name in missed:
            self.note(f"MISSED {name}")
        options = self.options
        if options.json is not None:
            content = {"machine": machine(), "quick": options.quick, "clock": options.clock_name, "cells": self.cells}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        return 1 if missed and self.options.strict else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line that all benchmarks share."""

    quick: bool
    strict: bool
    json: Path | None
    clock: Callable[[], float]  # seconds; of "cpu" those that the process computed, on all its threads together
    clock_name: str
    runs: int | None = None  # of a script that measures everything so many times; None: as it likes
    sweep: bool = False

    @classmethod
    def parse(cls, description: str | None, *, clock: str, runs: bool = False, sweep: str | None = None) -> Options:
        """Read the arguments; `clock` is the default of `--clock`. `runs` and `sweep` (its help) offer those too."""
        parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
        parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: under a minute")
        parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write values, times and machine facts there")
        parser.add_argument("--clock", dest="clock_name", choices=CLOCKS, default=clock, help=f"default: {clock}")
        if runs:
            parser.add_argument(
                "--runs", type=int, metavar="N", help="values are medians of N runs: 3, or 1 with --quick"
            )
        if sweep is not None:
            parser.add_argument("--sweep", action="store_true", help=sweep)
        given = vars(parser.parse_args())
        return cls(**given, clock=CLOCKS[given["clock_name"]])


def number(value: float) -> str:
    """Three digits or more, with thousands marked."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, threads, load, versions."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
    }
    if "torch" in sys.modules:
        facts["torch_threads"] = sys.modules["torch"].get_num_threads()
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:  # a source tree on sys.path, or not needed here
            facts[package] = None
    return facts


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
