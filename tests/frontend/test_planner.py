"""The capacity planner: its arithmetic against counting step by step, an engine's own use, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import radixrt as rx
from radixrt.frontend.capacity import Pool, Way
from radixrt.frontend.lengths import Lengths
from radixrt.frontend.terminal import bytes_text
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import HashModel

GEOMETRY = rx.KVGeometry(num_layers=2, num_kv_heads=4, head_dim=8, context_len=512)  # 512 bytes a token in float32
PAIRS = [(100, 20), (37, 64), (210, 5)]

pairs = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12)


def plan(lengths: Any = PAIRS, **changes: Any) -> rx.CapacityPlan:
    return rx.plan(**{"model": GEOMETRY, "lengths": lengths, "kv_memory": "2MiB"} | changes)


def ways(requests: list[tuple[int, int]], pool: Pool) -> tuple[Way, ...]:
    return pool.ways(Lengths.of(requests))


@pytest.mark.parametrize(
    ("num_bytes", "digits", "text"),
    [
        (0, 4, "0 B"),
        (1023, 4, "1023 B"),
        (720 * 2**10, 4, "720 KiB"),
        (2**30 - 2**10, 4, "1 GiB"),
        (2**28 - 2**17, 4, "255.9 MiB"),
        (2**28 - 2**17, 3, "256 MiB"),
        (5 * 2**40, 4, "5 TiB"),
    ],
)
def test_sizes_are_said_in_the_unit_that_they_round_to(num_bytes: int, digits: int, text: str) -> None:
    assert bytes_text(num_bytes, digits) == text


@given(pairs, st.integers(1, 40), st.integers(0, 50))
def test_what_a_session_holds_is_counted_step_by_step(
    requests: list[tuple[int, int]], page_size: int, shared: int
) -> None:
    """A request of p and o tokens holds p, ..., p + o - 1 of them, each for one step."""
    pool = Pool(num_pages=4000, page_size=page_size, max_len=512, shared_prefix=shared)
    held = [shared + p + k for p, o in requests for k in range(o)]
    most, power, paged, *rest = ways(requests, pool)
    assert most.session_pages == 512 / page_size
    assert most.sessions == 4000 * page_size // 512
    reserved = [shared + p + (1 << (o - 1).bit_length()) for p, o in requests for _ in range(o)]
    assert power.session_pages == pytest.approx(np.mean(reserved) / page_size)
    assert paged.session_pages == pytest.approx(np.mean([-(-n // page_size) for n in held]))
    for way in (most, paged):
        assert way.live_share == pytest.approx(way.sessions * np.mean(held) / pool.num_slots)
    if shared:
        (sharing,) = rest
        whole = shared // page_size
        assert sharing.session_pages == pytest.approx(paged.session_pages - whole)
        own = np.mean(held) - whole * page_size
        assert sharing.live_share == pytest.approx((whole * page_size + sharing.sessions * own) / pool.num_slots)
    else:
        assert not rest


@given(pairs, st.integers(1, 40), st.integers(1, 50))
def test_nothing_holds_more_than_the_pool(requests: list[tuple[int, int]], page_size: int, shared: int) -> None:
    """Not in the smallest pool that serves them, nor in a large one; and one always runs where pages are used."""
    longest = shared + max(p + o for p, o in requests)
    for num_pages in (-(-longest // page_size), 10_000):
        found = ways(requests, Pool(num_pages=num_pages, page_size=page_size, max_len=512, shared_prefix=shared))
        assert all(0 <= way.live_share <= 1 + 1e-9 for way in found)
        assert all(way.sessions >= 1 for way in found[1:])
        assert found[3].sessions >= found[2].sessions


def test_what_comes_together_runs_together() -> None:
    """Many short requests and few that take the pool: the replay ends, and with a figure."""
    (_, power, _) = ways([(1, 1)] * 1999 + [(400, 100)], Pool(num_pages=600, page_size=1, max_len=600))
    assert 1 <= power.sessions <= 600


def test_more_memory_and_smaller_pages_hold_more() -> None:
    sessions = [plan().at(size).ways[2].sessions for size in ("1MiB", "2MiB", "8MiB", "64MiB")]
    assert sessions == sorted(sessions)
    sessions = [plan(page_size=size).ways[2].sessions for size in (64, 16, 4, 1)]
    assert sessions == sorted(sessions)


def measured(requests: list[tuple[int, int]], pool: Pool) -> tuple[float, float]:
    """Requests at once and live share of an engine that always has more of these, drawn at random, waiting."""
    running, live = [], []

    def watch(batch: Batch) -> None:
        running.append(batch.num_segments)
        live.append((batch.positions[batch.row_indptr[1:] - 1] + 1).sum())

    random = np.random.default_rng(1)
    model = HashModel(vocab=300, context=pool.max_len, before_forward=watch)
    size: Any = {"num_pages": pool.num_pages, "page_size": pool.page_size, "token_budget": pool.num_slots}
    with rx.Engine(model, max_running=1000, **size) as engine:
        for number in range(300):
            while engine.stats().num_waiting >= 24:
                engine.step()
            prompt, output = requests[random.integers(len(requests))]
            tokens = [number, *random.integers(0, 300, prompt - 1).tolist()]
            engine.submit(tokens, rx.SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True))
        engine.check()
    return float(np.mean(running[len(running) // 4 :])), float(np.mean(live[len(live) // 4 :])) / pool.num_slots


def test_an_engine_runs_as_many_as_planned() -> None:
    requests = [(5, 20), (30, 8), (12, 60), (60, 30), (8, 3)]
    pool = Pool(num_pages=128, page_size=8, max_len=128)
    sessions, live_share = measured(requests, pool)
    paged = ways(requests, pool)[2]
    assert paged.sessions == pytest.approx(sessions, rel=0.05)
    assert paged.live_share == pytest.approx(live_share, rel=0.05)


def test_the_pool_is_the_one_that_an_engine_makes() -> None:
    made = rx.plan(
        rx.KVGeometry(num_layers=1, num_kv_heads=1, head_dim=2), lengths=(8, 8), kv_memory="100KB", max_len=64
    )
    with rx.Engine(HashModel(), kv_memory="100KB") as engine:  # takes 16 bytes a token too
        assert made.pool.num_pages == engine.config.num_pages


def test_the_default_maximum_is_the_context() -> None:
    assert plan().pool.max_len == 512
    assert plan(max_len=256).pool.max_len == 256
    with pytest.raises(rx.InvalidRequest, match="max_len: none given"):
        plan(model=rx.KVGeometry(num_layers=2, num_kv_heads=4, head_dim=8))


def test_longer_requests_are_left_out_and_said_so() -> None:
    made = plan([(100, 20), (500, 13), (500, 12), (2000, 1)])
    assert (len(made.lengths), made.num_left_out) == (2, 2)
    assert "2 longer ones left out" in str(made)
    assert "left out" not in str(plan())
    assert plan([(100, 20), (300, 50)], kv_memory="128KiB").num_left_out == 1  # the pool holds 256 tokens
    assert plan([(100, 20), (300, 50)], shared_prefix=200).num_left_out == 1


def test_the_text_says_what_the_figures_stand_on() -> None:
    lines = str(plan(shared_prefix=64)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "2 layers of 4 KV heads of 8, float32: 512 bytes a token, 8 KiB a page of 16"
    assert lines[1] == "pool of 2 MiB: 256 pages, 4,096 tokens"
    assert lines[2] == "3 requests of up to 512 tokens"
    assert lines[3] == "on average 64 shared + 116 prompt + 30 output tokens"
    names = [line.strip().split("  ")[0] for line in lines[-4:]]
    assert names == ["reserve 512 tokens", "reserve a power of two", "paged", "paged, prefix shared"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": (100, 600)}, "700 tokens.*max_len is 512"),
        ({"kv_memory": "lots"}, "kv_memory.*lots"),
        ({"kv_memory": "1KiB"}, "kv_memory"),
        ({"page_size": 0}, "page_size"),
        ({"max_len": 1}, "max_len: 1 given"),
        ({"max_len": True}, "max_len: True given"),
        ({"shared_prefix": -1}, "shared_prefix: -1 given"),
        ({"shared_prefix": 1.5}, "shared_prefix: 1.5 given"),
    ],
)
def test_mistakes_are_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(rx.InvalidRequest, match=words):
        plan(**changes)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(rx.ModelError, match="int3"):
        plan(dtype="int3")


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_the_picture(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan(shared_prefix=64).plot(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    if name.endswith("svg"):
        assert b"Sessions at once" in content or len(content) > 10_000  # texts may be drawn as outlines


def test_a_picture_of_no_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(rx.InvalidRequest, match="no picture format"):
        plan().plot(tmp_path / "plan.doc")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(rx.InvalidRequest, match=r"matplotlib is not installed; pip install 'radixrt\[plot\]'"):
        plan().plot(tmp_path / "plan.png")
