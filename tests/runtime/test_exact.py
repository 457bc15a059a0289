"""Answers are exact by default: every logit has the same bits whatever else a step holds and however it came about.

Tiny random models with prompts longer than two reduction groups, on both attention paths. Each thing that makes it so
is also taken away, and the bits are seen to change: the tests have power.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from radixrt.kernels.draws import Drawer, Logits
from radixrt.kernels.plan import AttentionPlan
from radixrt.runtime import Engine, FinishEvent, SamplingParams, loop as loop_module
from radixrt.runtime.batch import Batch
from radixrt.runtime.errors import ModelError
from radixrt.runtime.sampler import SamplerRow, sample
from radixrt.runtime.transformer import TransformerModel

from ..plans import random_plan
from . import tiny

CONTEXT_LEN = 1024
NUM_PROMPTS = 32
NEW_TOKENS = 6
CONFIG: dict[str, Any] = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_LEN,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**CONFIG),
    "qwen3": lambda: hf.Qwen3Config(**CONFIG),
    "gemma2": lambda: hf.Gemma2Config(**CONFIG, sliding_window=300),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=208, n_embd=96, n_layer=2, n_head=3, n_positions=CONTEXT_LEN, initializer_range=0.2
    ),
}
CASES = [
    ("llama", "float32", "native"),
    ("llama", "float32", "torch"),
    ("llama", "bfloat16", "native"),
    ("gemma2", "float32", "native"),
    pytest.param("qwen3", "bfloat16", "native", marks=pytest.mark.deep),
    pytest.param("llama", "bfloat16", "torch", marks=pytest.mark.deep),
    pytest.param("llama", "float64", "torch", marks=pytest.mark.deep),
    pytest.param("qwen3", "bfloat16", "torch", marks=pytest.mark.deep),
    pytest.param("gemma2", "float32", "torch", marks=pytest.mark.deep),
    pytest.param("gpt2", "float32", "torch", marks=pytest.mark.deep),
]

Seen = dict[tuple[tuple[int, ...], int], Logits]  # by (seed, position): which request, and where


def make(name: str, dtype: str, kernel: str, *, exact: bool | None = None) -> TransformerModel:
    model = tiny.build(CONFIGS[name](), dtype=getattr(torch, dtype))
    return TransformerModel(model, exact=exact, cpu_kernel=kernel)


def prompts() -> list[list[int]]:
    """Most share 560 tokens, or 300 of these; some share none; lengths stand on all sides of the groups."""
    random = np.random.default_rng(0)
    stem = random.integers(208, size=560).tolist()
    made = [stem[: (560, 560, 300, 0)[i % 4]] + random.integers(208, size=3 + 5 * i).tolist() for i in range(30)]
    return [*made, stem[:511], stem[:512]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """All logits that any engine samples from; where a place is met again, its bits must be the same."""
    logits: Seen = {}

    def look(rows_of_logits: list[Logits], rows: list[SamplerRow], draw: Drawer) -> Any:
        for scores, row in zip(rows_of_logits, rows, strict=True):
            place = row.seed, row.position
            if place not in logits:
                logits[place] = scores.copy()
            elif not np.array_equal(scores, logits[place]):
                raise Different(place)
        return sample(rows_of_logits, rows, draw)

    monkeypatch.setattr(loop_module, "sample", look)
    return logits


class Different(BaseException):
    """Not an Exception: an engine would take that for a fault of the model's and end the request."""


def run(model: TransformerModel, numbers: range, *, times: int = 1, **settings: Any) -> Engine:
    """Some of the prompts, at once, `times` times."""
    engine = Engine(model, **{"num_pages": 2400, "poison": True} | settings)
    for _ in range(times):
        for number in numbers:
            engine.submit(prompts()[number], params(number))
        finish(engine)
    return engine


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, seed=number, ignore_eos=True)


def finish(engine: Engine) -> None:
    stats = engine.stats()
    while stats.num_running or stats.num_waiting:
        for event in engine.step():
            assert not isinstance(event, FinishEvent) or event.output.choices[0].finish_reason == "length"
        stats = engine.stats()


@pytest.mark.parametrize(("name", "dtype", "kernel"), CASES)
def test_no_way_of_computing_changes_a_bit(name: str, dtype: str, kernel: str, seen: Seen) -> None:
    model = make(name, dtype, kernel)
    assert model.exact
    for number in range(0, NUM_PROMPTS, 3):
        run(model, range(number, number + 1), prefix_cache=False).close()
    assert model.describe()["attention"].startswith(kernel)
    run(model, range(NUM_PROMPTS), times=2, token_budget=4096).close()  # cold in one step, then hot
    assert len(seen) == NUM_PROMPTS * NEW_TOKENS
    run(model, range(0, NUM_PROMPTS, 4), prefill_chunk=7, page_size=32).close()
    run(model, range(0, NUM_PROMPTS, 2), prefill_chunk=64, token_budget=130).close()
    run(model, range(0, NUM_PROMPTS, 5), prefill_chunk=1, token_budget=17).close()
    assert len(seen) == NUM_PROMPTS * NEW_TOKENS


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_threads_forks_and_preemption_change_no_bit(kernel: str, seen: Seen) -> None:
    model = make("llama", "float32", kernel)
    run(model, range(NUM_PROMPTS)).close()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            run(model, range(NUM_PROMPTS), threads=threads, token_budget=100).close()
    finally:
        torch.set_num_threads(before)
    with run(model, range(3, 27, 4), num_pages=55, page_size=8) as engine:
        assert engine.stats().counters.preemptions > 0
    with Engine(model, num_pages=2400) as engine:
        parents = [engine.submit(prompts()[number], params(number)) for number in range(8)]
        for _ in range(4):
            engine.step()
        for parent in parents:
            engine.fork(parent, 2)
        finish(engine)
    assert len(seen) == NUM_PROMPTS * NEW_TOKENS


@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "native"), ("bfloat16", "native"), ("float32", "torch")])
def test_no_plan_changes_a_bit(dtype: str, kernel: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", dtype, kernel)
    run(model, range(NUM_PROMPTS)).close()
    random = Random(0)

    def plan(batch: Batch, *, page_size: int, exact: bool, sharing_cost: int) -> AttentionPlan:
        step = batch.positions, batch.row_indptr, batch.page_indptr, batch.page_ids
        return random_plan(random, *step, page_size=page_size, exact=exact)

    monkeypatch.setattr(Batch, "plan", plan)
    for _ in range(2):
        run(model, range(NUM_PROMPTS), token_budget=200).close()
    assert len(seen) == NUM_PROMPTS * NEW_TOKENS


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_ungrouped_attention_would_be_seen(kernel: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes that are reduced in blocks from wherever they start, sharing changes bits."""
    model = make("llama", "float32", kernel)
    grouped = Batch.plan

    def ungrouped(batch: Batch, *, page_size: int, exact: bool, sharing_cost: int) -> AttentionPlan:
        return grouped(batch, page_size=page_size, exact=False, sharing_cost=sharing_cost)

    monkeypatch.setattr(Batch, "plan", ungrouped)
    for number in range(4):
        run(model, range(number, number + 1), prefix_cache=False).close()
    with pytest.raises(Different):
        run(model, range(NUM_PROMPTS))


def test_products_of_single_rows_would_be_seen(seen: Seen) -> None:
    """Without padding and tiles the bits of a row depend on how many stand beside it."""
    model = make("llama", "float32", "torch", exact=False)
    assert not model.exact
    run(model, range(1)).close()
    with pytest.raises(Different):
        run(model, range(NUM_PROMPTS))


SMALL: dict[str, Any] = CONFIG | {"hidden_size": 60, "head_dim": 14, "num_attention_heads": 5}
OWN_FUNCTIONS: dict[str, tuple[Callable[[], Any], int, Any]] = {  # a config, how wide its function's input is, and that
    f"lfm2 {width}": (
        lambda width=width: hf.Lfm2Config(
            **CONFIG | {"intermediate_size": width}, layer_types=["full_attention"] * 2, block_auto_adjust_ff_dim=False
        ),
        width,
        F.silu,
    )
    for width in (77, 100, 129, 200)
} | {"afmoe": (lambda: hf.AfmoeConfig(**SMALL, num_dense_layers=2), 70, torch.sigmoid)}


@pytest.mark.parametrize("name", OWN_FUNCTIONS)
def test_functions_that_a_model_calls_itself_are_seen(name: str) -> None:
    """LFM2's MLP calls silu and AfMoE's attention sigmoid, no module. At widths that are no multiple of 64 torch
    computes the rest with other code, so a row's bits depend on where it stands; at 129 only among some hundred rows.
    """
    config, width, function = OWN_FUNCTIONS[name]
    rows = torch.randn(529, width, generator=torch.Generator().manual_seed(0))
    if torch.equal(function(rows), torch.cat([function(row[None]) for row in rows])):
        pytest.skip("on this machine torch's scalar and vector code agree to the bit")
    model = TransformerModel(tiny.build(config(), dtype=torch.float32))
    assert not model.exact
    assert "a row's bits depend on" in model.describe()["exact"]
    with pytest.raises(ModelError, match="cannot be served with exact=True"):
        TransformerModel(tiny.build(config(), dtype=torch.float32), exact=True)
