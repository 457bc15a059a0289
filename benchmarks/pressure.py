"""An engine offered three times what its pool holds: recompute what was lost, keep it in host memory, or decide.

Sessions of two turns that come back after all others have run. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report, Timing, Variant, time_rounds

# isort: split
import radixrt as rx
from radixrt.kernels.plan import IntArray
from radixrt.runtime import FinishEvent, load_model
from radixrt.runtime.fences import Fence

MODEL = "smollm2-135m"
PAGE_SIZE = 16
PROMPT_LEN, TURN_LEN, OUTPUT_LEN = 192, 16, 24  # tokens: of a first turn, of what the second adds, of each answer
OVERLOAD = 3  # all sessions at their ends over what the pool holds
THROTTLE = 100  # times as long as a copy takes
QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "gsm8k.json"
MODES = {"recompute": "never", "host tier": "always", "automatic": "auto"}


@dataclass(slots=True)
class Throttled:
    """A model whose copies between device and host take `THROTTLE` times as long."""

    model: Any

    def copy_out(self, device_pages: IntArray, host_pages: IntArray) -> Fence:
        return self._slowly(self.model.copy_out, device_pages, host_pages)

    def copy_in(self, host_pages: IntArray, device_pages: IntArray) -> Fence:
        return self._slowly(self.model.copy_in, host_pages, device_pages)

    def _slowly(self, copy: Any, src: IntArray, dst: IntArray) -> Fence:
        begun = perf_counter()
        fence: Fence = copy(src, dst)
        fence.wait()
        sleep((perf_counter() - begun) * (THROTTLE - 1))
        return fence

    def forward(self, batch: Any) -> Any:
        return self.model.forward(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@dataclass(slots=True, kw_only=True)
class Load:
    """Sessions on one engine, of which each asks twice; keeps what the last run answered."""

    engine: rx.Engine
    prompts: list[list[int]]
    turns: list[list[int]]
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def run(self) -> None:
        """All first turns, then all second ones in the same order: by then the first are cold."""
        params = rx.SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        self.answers = []
        asked = self.prompts
        for turn in (self.turns, None):
            handles = [self.engine.submit(prompt, params) for prompt in asked]
            outputs: dict[rx.Handle, rx.Output] = {}
            while len(outputs) < len(handles):
                outputs |= {e.handle: e.output for e in self.engine.step() if isinstance(e, FinishEvent)}
            ordered = [outputs[handle] for handle in handles]
            self.answers += [output.choices[0].token_ids for output in ordered]
            if turn is not None:
                asked = [
                    [*output.prompt_token_ids, *output.choices[0].token_ids, *more]
                    for output, more in zip(ordered, turn, strict=True)
                ]

    def forget(self) -> None:
        self.engine.reset_cache()

    @property
    def num_tokens(self) -> int:
        """Tokens that one run generates."""
        return 2 * len(self.prompts) * OUTPUT_LEN


def make_texts(tokenizer: rx.Tokenizer, num_sessions: int) -> tuple[list[list[int]], list[list[int]]]:
    """First turns that begin differently, and what the second ones add."""
    text = itertools.cycle(json.loads(QUESTIONS.read_text()))
    prompts, turns = [], []
    for number in range(num_sessions):
        ids: list[int] = tokenizer.encode(f"{number}.")
        while len(ids) < PROMPT_LEN + TURN_LEN:
            ids += tokenizer.encode(f" {next(text)}")
        prompts.append(ids[:PROMPT_LEN])
        turns.append(ids[PROMPT_LEN : PROMPT_LEN + TURN_LEN])
    return prompts, turns


def make_load(num_sessions: int, *, swap: str, throttled: bool = False, unpressured: bool = False) -> Load:
    model, tokenizer = load_model(MODEL)
    pages = num_sessions * -(-(PROMPT_LEN + TURN_LEN + 2 * OUTPUT_LEN) // PAGE_SIZE)
    settings: dict[str, Any] = {"num_pages": pages * 2 if unpressured else pages // OVERLOAD, "page_size": PAGE_SIZE}
    engine = rx.Engine(
        Throttled(model) if throttled else model, tokenizer=tokenizer, swap=swap, num_host_pages=2 * pages, **settings
    )
    prompts, turns = make_texts(tokenizer, num_sessions)
    return Load(engine=engine, prompts=prompts, turns=turns)


def measure(report: Report, num_sessions: int) -> None:
    loads = {name: make_load(num_sessions, swap=swap) for name, swap in MODES.items()}
    free = make_load(num_sessions, swap="never", unpressured=True)
    free.run()
    variants = {name: Variant(prepare=load.forget, run=lambda _, load=load: load.run()) for name, load in loads.items()}
    rounds = 1 if report.options.quick else 3
    times = time_rounds(variants, rounds=rounds, warmups=1, clock=report.options.clock)
    report.section(f"{num_sessions} sessions of two turns, {OVERLOAD} times the pool", "recompute")
    base = times["recompute"]
    for name, load in loads.items():
        shown = f"{base.ratio(times[name]):.2f} x"
        rate = load.num_tokens / times[name].median
        report.add(f"{name}, tokens a second", rate, "", baseline=shown, timing=times[name], against=base)
    better = min(times["recompute"], times["host tier"], key=lambda timing: timing.median)
    goal = None if report.options.quick else Goal.at_least(0.95)
    report.add("automatic over the better", better.ratio(times["automatic"]), "x", goal=goal)
    for name, load in loads.items():
        describe(report, name, load)
    same = sum(load.answers == free.answers for load in loads.values())
    report.add("equal to a run with room", same, f"of {len(loads)}", goal=Goal.at_least(len(loads)))
    for load in (*loads.values(), free):
        load.engine.check()
        load.engine.close()
    measure_throttled(report, num_sessions, base, free)


def describe(report: Report, name: str, load: Load) -> None:
    stats = load.engine.stats()
    waits, moved, counters = stats.waits.between_tokens, stats.transfers, stats.counters
    report.note(
        f"{name}: between tokens p50 {waits.quantile(0.5) * 1e3:,.0f} ms, p99 {waits.quantile(0.99) * 1e3:,.0f} ms; "
        f"{counters.preemptions} preemptions; pages out {moved.swap_outs:,}, in {moved.swap_ins:,} "
        f"({moved.bytes_moved / 2**30:.1f} GiB); {counters.computed:,} prompt rows computed"
    )


def measure_throttled(report: Report, num_sessions: int, base: Timing, free: Load) -> None:
    """With copies that do not pay, deciding is recomputing, but for the few that find out."""
    load = make_load(num_sessions, swap="auto", throttled=True)
    variant = Variant(prepare=load.forget, run=lambda _: load.run())
    before = load.engine.stats().transfers
    timing = time_rounds({"throttled": variant}, rounds=1, warmups=1, clock=report.options.clock)["throttled"]
    moved = load.engine.stats().transfers
    report.section(f"copies {THROTTLE} times slower", "recompute")
    report.add(
        "automatic, tokens a second",
        load.num_tokens / timing.median,
        "",
        baseline=f"{base.median / timing.median:.2f} x",
    )
    pages = load.engine.stats().cache.num_pages
    share = (moved.swap_outs - before.swap_outs) / pages
    report.add("pages moved, of the pool", share, "x", goal=Goal.at_most(0.1), baseline=f"{pages:,} pages")
    report.add("equal to a run with room", load.answers == free.answers, "", goal=Goal.at_least(1))
    load.engine.check()
    load.engine.close()


def main() -> int:
    report = Report(options=Options.parse(__doc__, clock="wall"))
    measure(report, 6 if report.options.quick else 24)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
