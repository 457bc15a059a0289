"""How full a KV pool gets: the share that holds live tokens, and requests at once, against reservation; and rx.plan.

Real request lengths through the real allocator and scheduler, on a model without numerics. See benchmarks/README.md.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report  # before torch

# isort: split
import numpy as np

import radixrt as rx
from radixrt.frontend.capacity import Pool
from radixrt.frontend.lengths import Lengths
from radixrt.frontend.reservation import replay
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import HashModel

DATA = Path(__file__).parent / "data"
PAGE_SIZES = (1, 16, 32, 128)
VOCAB = 16  # the less, the faster the model
QUEUE = 16  # requests kept waiting: more than a step admits, once the pool is full
AGREEMENT = 5.0  # percent, of the plan with what was measured
WARM_UP = 0.2  # of the steps: the first requests start together, and so are younger than those that run later


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths, the longest request, the pool, and what is known of them, in percent of the pool.

    `known` (by page size) comes from a replay that keeps nothing back for the oldest request, as the engine does: it
    may stay `slack` points below. `known_reserved` are maximum length, power of two and true length.
    """

    name: str
    file: str
    max_len: int
    num_slots: int
    known: dict[int, float]
    known_reserved: tuple[float, float, float]
    slack: float
    num_requests: int  # of the reservations, which are replayed fast
    num_paged: int  # of the engine's
    num_quick: int  # of the engine's with --quick, and then at one page size

    def lengths(self, num_requests: int) -> Lengths:
        """The file's first ones that max_len holds."""
        given = Lengths.read(DATA / self.file)
        kept = given.where(given.prompt + given.output <= self.max_len)
        return kept.where(np.arange(len(kept)) < num_requests)


AIBRIX, AZURE = "aibrix/sharegpt_lengths.csv.gz", "azure/conversation_lengths.csv.gz"
WORKLOADS = (
    Workload(
        name="ShareGPT-like",
        file=AIBRIX,
        max_len=2048,
        num_slots=1 << 14,
        known={1: 97.1, 16: 95.4, 32: 93.6, 128: 84.3},
        known_reserved=(19.5, 55.1, 65.1),
        slack=3.5,
        num_requests=2026,
        num_paged=2026,
        num_quick=1000,
    ),
    Workload(
        name="Azure conversation",
        file=AZURE,
        max_len=2048,
        num_slots=1 << 14,
        known={1: 96.2, 16: 95.6, 32: 95.0, 128: 91.5},
        known_reserved=(56.7, 65.0, 71.9),
        slack=1.0,
        num_requests=2000,
        num_paged=1000,
        num_quick=200,
    ),
    Workload(
        name="Azure conversation",
        file=AZURE,
        max_len=8192,
        num_slots=1 << 16,
        known={1: 97.4, 16: 96.9, 32: 96.2, 128: 92.8},
        known_reserved=(15.3, 65.2, 69.9),
        slack=1.0,
        num_requests=3000,
        num_paged=1000,
        num_quick=400,
    ),
)


@dataclass(slots=True)
class Use:
    """What was in use, step by step."""

    live: list[int] = field(default_factory=list)  # tokens
    running: list[int] = field(default_factory=list)  # requests
    held: list[int] = field(default_factory=list)  # slots of pages that requests hold

    def mean(self, what: list[int]) -> float:
        return float(np.mean(what[int(WARM_UP * len(what)) :]))


def run_engine(workload: Workload, lengths: Lengths, page_size: int) -> tuple[Use, int]:
    """Keep an engine's queue full until the requests are used up; what each step held, and how many preemptions.

    Each has a namespace of its own, so that nothing is shared, and a step's budget holds any prompt: all that runs has
    a row in each step, and the batch tells every length.
    """
    use, random = Use(), np.random.default_rng(0)

    def watch(batch: Batch) -> None:
        use.running.append(batch.num_segments)
        use.live.append(int((batch.positions[batch.row_indptr[1:] - 1] + 1).sum()))
        use.held.append(len(batch.page_ids) * page_size)  # nothing is shared: each table's pages are its own

    model = HashModel(vocab=VOCAB, context=workload.max_len, before_forward=watch)
    num_pages = workload.num_slots // page_size
    with rx.Engine(
        model, num_pages=num_pages, page_size=page_size, token_budget=workload.num_slots, max_running=1 << 12
    ) as engine:
        coming = enumerate(zip(lengths.prompt.tolist(), lengths.output.tolist(), strict=True))
        missing = QUEUE
        while missing == len(new := list(islice(coming, missing))):
            for number, (prompt, output) in new:
                params = rx.SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
                engine.submit(random.integers(0, VOCAB, prompt).tolist(), params, f"request {number}")
            engine.step()
            missing = max(0, QUEUE - engine.stats().num_waiting)
        engine.check()
        return use, engine.stats().counters.preemptions


def measure(report: Report, workload: Workload) -> None:
    print(f"\n== {workload.name}, max length {workload.max_len:,}, pool of {workload.num_slots:,} slots", flush=True)
    reserved = measure_reserved(report, workload)
    lengths = workload.lengths(workload.num_quick if report.options.quick else workload.num_paged)
    for page_size in PAGE_SIZES[1:2] if report.options.quick else PAGE_SIZES:
        measure_paged(report, workload, lengths, page_size, reserved)


def measure_reserved(report: Report, workload: Workload) -> float:
    """Neighbouring slots for a request's whole life, first fit; the requests at once at the maximum length."""
    lengths = workload.lengths(workload.num_requests)
    power = 1 << np.ceil(np.log2(lengths.output)).astype(np.int64)
    sizes = {
        "maximum length": np.full(len(lengths), workload.max_len),
        "prompt, power of two": lengths.prompt + power,
        "true length": lengths.prompt + lengths.output,
    }
    at_once = {}
    report.section("reserved, neighbouring slots", "known")
    for (name, needed), known in zip(sizes.items(), workload.known_reserved, strict=True):
        at_once[name], live = replay(lengths, needed, workload.num_slots)
        report.add(name, 100 * live / workload.num_slots, "% of the pool", baseline=f"{known} %")
        report.add("  requests at once", at_once[name], "")
    report.note(f"{len(lengths):,} requests")
    return at_once["maximum length"]


def measure_paged(report: Report, workload: Workload, lengths: Lengths, page_size: int, reserved: float) -> None:
    """An engine's use of pages beside the known figure and the plan; `reserved`: requests at once without pages."""
    use, preemptions = run_engine(workload, lengths, page_size)
    live, running, held = (use.mean(what) for what in (use.live, use.running, use.held))
    share, of_pages, known = 100 * live / workload.num_slots, 100 * live / held, workload.known[page_size]
    pool = Pool(num_pages=workload.num_slots // page_size, page_size=page_size, max_len=workload.max_len)
    planned = pool.ways(lengths)[2]
    agrees = None if report.options.quick else Goal.at_most(AGREEMENT)  # a short run has other requests at its ends
    report.section(f"pages of {page_size}", "known, or planned")
    report.add("live tokens", share, "% of the pool", goal=Goal.at_least(known - workload.slack), baseline=f"{known} %")
    off = 100 * abs(100 * planned.live_share / share - 1)
    report.add("  the plan is off by", off, "%", goal=agrees, baseline=f"{planned.live_share:.1%}")
    report.add("  in pages that are held", of_pages, "% of them")
    report.add("requests at once", running, "")
    off = 100 * abs(planned.sessions / running - 1)
    report.add("  the plan is off by", off, "%", goal=agrees, baseline=f"{planned.sessions:.1f}")
    report.add("  over the maximum length's", running / reserved, "x")
    report.note(f"{len(lengths):,} requests, {len(use.live):,} steps, {preemptions:,} preemptions")


def main() -> int:
    report = Report(options=Options.parse(__doc__, clock="cpu"))
    for workload in WORKLOADS:
        measure(report, workload)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
