"""What one decode step of the real model costs beside transformers and a forward pass written by hand, and where.

SmolLM2 after 512 tokens of GSM8K text. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report, Timing, Variant, number, time_rounds  # before torch

# isort: split
import numpy as np
import torch
from _lean import LeanModel, layer_shape
from _limits import Limits, Machine
from _phases import FORWARD, PLAN, watch

import radixrt as rx
from radixrt.runtime import Tokenizer
from radixrt.runtime.backends import choose_backend
from radixrt.runtime.batch import Batch
from radixrt.runtime.conversion import quiet_transformers
from radixrt.runtime.loading import resolve

MODEL, PAGE_SIZE = "smollm2-135m", 16
DATA = Path(__file__).parent / "data" / "gsm8k.json"
HF, OURS, LOOSE, LEAN = "transformers", "ours", "ours, not exact", "lean"
SPARE = 100  # tokens that the first sequence of an engine may be ahead when the last one begins
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "sampled, top_p": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured how often."""

    context: int  # tokens in the cache before the step
    batches: tuple[int, ...]
    runs: int
    rounds: int  # of one run
    engine_steps: int

    @property
    def pages_each(self) -> int:
        """Of one sequence, up to the last step of the engine, and one for the watermark."""
        return -(-(self.context + self.engine_tokens) // PAGE_SIZE) + 1

    @property
    def engine_tokens(self) -> int:
        """That each of an engine's sequences may generate."""
        return 2 * self.engine_steps + SPARE

    @property
    def num_pages(self) -> int:
        return max(self.batches) * self.pages_each

    def batch(self, texts: np.ndarray, first: int, count: int, start: int, stop: int) -> Batch:
        """Positions `[start, stop)` of sequences `[first, first + count)`; logits of the last row of each."""
        tables = 1 + np.arange(first, first + count)[:, None] * self.pages_each + np.arange(-(-stop // PAGE_SIZE))
        return Batch.side_by_side(
            texts[first : first + count, start:stop], start=start, tables=tables, page_size=PAGE_SIZE
        )


class Transformers:
    """The library's own model and attention, over a `DynamicCache` filled with every sequence's context."""

    def __init__(self, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        with quiet_transformers():
            self.model = loader.from_pretrained(resolve(MODEL), dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self.model.eval()
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fill(self, layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take keys and values `[sequences, positions, Hkv, D]` of each layer as the content of the cache."""
        self._filled = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in layers]

    def cache_of(self, count: int) -> Callable[[], Any]:
        """Makes the cache of the first sequences as it was before their step: no tensor is copied again."""
        parts = [(k[:count].contiguous(), v[:count].contiguous()) for k, v in self._filled]
        cache = self._new_cache()
        for layer, (k, _) in zip(cache.layers, parts, strict=True):
            layer.lazy_initialization(k, k)

        def rewound() -> Any:
            for layer, (k, v) in zip(cache.layers, parts, strict=True):
                layer.keys, layer.values = k, v
            return cache

        return rewound

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits `[B, V]` of one more token each."""
        logits: torch.Tensor = self.model(input_ids=token_ids, cache=cache, use_cache=True).logits
        return logits[:, -1].float()

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The models of one dtype, all of which hold the same contexts."""

    report: Report
    machine: Machine
    sizes: Sizes
    dtype: str
    texts: np.ndarray  # [sequences, context + 1]
    hf: Transformers
    engines: Mapping[str, rx.Engine]
    lean: LeanModel

    def fill(self) -> None:
        """Compute the context of every sequence in ours, and copy keys and values to the other models."""
        count, context = len(self.texts), self.sizes.context
        pools = {name: engine.model._pool for name, engine in self.engines.items()}
        for i in range(count):
            self.engines[OURS].model.forward(self.sizes.batch(self.texts, i, 1, 0, context))
        unpacked = []
        for i, shape in pools[OURS].shapes.items():
            kv = pools[OURS].layer(i, shape)
            for other in (pools[LOOSE].layer(i, shape), self.lean.caches[i]):
                other.k[:] = kv.k
                other.v[:] = kv.v
            pages = (cache[1 : self.sizes.num_pages + 1] for cache in pools[OURS].backend.unpack(kv))
            unpacked.append(tuple(part.reshape(count, -1, *part.shape[2:])[:, :context] for part in pages))
        self.hf.fill(unpacked)

    def decode(self, count: int) -> None:
        """One step of so many sequences; it writes position `context` and can be repeated."""
        context = self.sizes.context
        batch = self.sizes.batch(self.texts, 0, count, context, context + 1)
        token_ids, rewound = torch.from_numpy(self.texts[:count, context:]), self.hf.cache_of(count)
        calls = {name: engine.model.forward for name, engine in self.engines.items()}
        variants = {HF: Variant(prepare=rewound, run=lambda cache: self.hf.step(token_ids, cache))}
        variants |= {name: Variant(run=lambda _, call=call: call(batch)) for name, call in calls.items()}
        variants |= {LEAN: Variant(run=lambda _: self.lean.forward(batch))}
        logits = {name: call(batch).logits for name, call in calls.items()} | {LEAN: self.lean.forward(batch)}
        expected = self.hf.step(token_ids, rewound())
        runs = []
        for _ in range(self.sizes.runs):
            limits = self.machine.limits(getattr(torch, self.dtype))
            times = time_rounds(variants, rounds=self.sizes.rounds, clock=self.report.options.clock)
            runs.append((times, limits))
        self.report.section(f"{self.dtype}, {count} x {context} tokens", "of the limit")
        self.show(count, runs)
        self.report.note(f"limits {'; '.join(str(limits) for _, limits in runs)}")
        for name, its in logits.items():
            error = ((its - expected).abs().max() / expected.abs().max()).item()
            same = int((its.argmax(dim=1) == expected.argmax(dim=1)).sum())
            self.report.note(f"{name}: logits off by {number(error)} of the largest; {same} of {count} choices alike")
            assert error < {"float32": 1e-3, "bfloat16": 0.1}[self.dtype], f"{name} is another model"

    def show(self, count: int, runs: list[tuple[dict[str, Timing], Limits]]) -> None:
        needs, is_full = self.needs(count), self.sizes.context == 512
        for name in runs[0][0]:
            timing = Timing(tuple(seconds for times, _ in runs for seconds in times[name].seconds))
            share = median(100 * limits.seconds(**needs) / times[name].median for times, limits in runs)
            self.report.add(name, timing.median * 1e3, "ms", baseline=f"{share:.0f} %", timing=timing)
        floor = 1.1 if count == 1 else {"float32": 1.6, "bfloat16": 3.5}[self.dtype]
        goals = (
            (f"{HF} over ours", HF, OURS, Goal.at_least(floor) if is_full else None),
            ("ours / lean", OURS, LEAN, Goal.at_most(1.15 if count == 1 else 1.1)),
            ("ours / not exact", OURS, LOOSE, Goal.at_most(1.1)),
        )
        for label, name, other, goal in goals:
            self.report.add(label, median(times[name].ratio(times[other]) for times, _ in runs), "x", goal=goal)

    def needs(self, count: int) -> dict[str, float]:
        """Bytes that a step must read, weights and KV once, and its flops."""
        config, weights = self.hf.model.config, sum(weight.numel() for weight in self.hf.model.parameters())
        heads, kv_heads, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
        read = count * (self.sizes.context + 1) * layers * config.hidden_size // heads
        itemsize = getattr(torch, self.dtype).itemsize
        return {
            "num_bytes": (weights + 2 * read * kv_heads) * itemsize,
            "flops": 2 * weights * count + 4 * read * heads,
        }

    def overhead(self, kind: str) -> None:
        """The engine's own steps with every sequence decoding, by phase."""
        engine = self.engines[OURS]
        params = rx.SamplingParams(max_tokens=self.sizes.engine_tokens, ignore_eos=True, **PARAMS[kind])
        handles = [engine.submit(text[:-1].tolist(), params) for text in self.texts]
        started: set[rx.Handle] = set()
        while len(started) < len(handles):
            started |= {event.handle for event in engine.step()}
        parted, steps = self.phases(), self.phases(FORWARD, PLAN)
        for handle in handles:
            engine.abort(handle)
        engine.step()
        whole = median(sum(step.values()) for step in parted)
        self.report.section(f"{self.dtype}, an engine's step of {len(handles)}, {kind}", "of the step")
        for phase in parted[0]:
            seconds = median(step[phase] for step in parted)
            self.report.add(phase, seconds * 1e3, "ms", baseline=f"{100 * seconds / whole:.1f} %")
        share = median(1 - step[FORWARD] / sum(step.values()) for step in steps)
        self.report.add("all but forward", 100 * share, "%", goal=Goal.at_most(10))

    def phases(self, *only: str) -> list[dict[str, float]]:
        """The phases of some steps of the engine, or only these and the rest."""
        steps = []
        with watch(self.engines[OURS], self.report.options.clock, only=only) as phases:
            for _ in range(self.sizes.engine_steps):
                self.engines[OURS].step()
                steps.append(phases.take())
        return steps


def contexts(tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
    """Stretches of the data's text that begin at different places, `[count, length]`."""
    data = json.loads(DATA.read_text())
    shots = [f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in data["examples"]]
    tokens = tokenizer.encode("".join(shots) + "\n".join(data["questions"]))
    begins = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return np.array(tokens, dtype=np.int64)[begins[:, None] + np.arange(length)]


def measure(report: Report, machine: Machine, sizes: Sizes, dtype: str) -> None:
    settings = {"dtype": dtype, "page_size": PAGE_SIZE, "num_pages": sizes.num_pages}
    engines = {name: rx.Engine(MODEL, exact=name == OURS, **settings) for name in (OURS, LOOSE)}
    tokenizer = engines[OURS].tokenizer
    assert tokenizer is not None
    hf = Transformers(dtype)
    chosen = choose_backend(torch.device("cpu"), getattr(torch, dtype), PAGE_SIZE, [layer_shape(hf.model.config)])
    print(f"\n{dtype}: attention is {chosen}")
    lean = LeanModel(hf.model, chosen.backend, num_pages=sizes.num_pages, page_size=PAGE_SIZE)
    texts = contexts(tokenizer, max(sizes.batches), sizes.context + 1)
    bench = Bench(
        report=report,
        machine=machine,
        sizes=sizes,
        dtype=dtype,
        texts=texts,
        hf=hf,
        engines=engines,
        lean=lean,
    )
    bench.fill()
    for count in sizes.batches:
        bench.decode(count)
    for kind in PARAMS:
        bench.overhead(kind)
    for engine in engines.values():
        engine.close()


def main() -> int:
    options = Options.parse(__doc__, clock="wall", runs=True)
    if options.quick:
        sizes = Sizes(context=128, batches=(1, 8), runs=options.runs or 1, rounds=5, engine_steps=10)
    else:
        sizes = Sizes(context=512, batches=(1, 8, 32), runs=options.runs or 3, rounds=9, engine_steps=40)
    report, machine = Report(options=options), Machine(options.clock)
    print(f"{torch.get_num_threads()} threads; medians of {sizes.runs} runs of {sizes.rounds} rounds")
    for dtype in ("bfloat16",) if options.quick else ("float32", "bfloat16"):
        measure(report, machine, sizes, dtype)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
