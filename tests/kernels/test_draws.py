"""The keyed noise: its distribution, what it depends on, and that it stays what it is; and all that draw with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st

from radixrt.kernels.cpu import native
from radixrt.kernels.cpu.draw import NativeDraw
from radixrt.kernels.draws import (
    _FEW,
    _RARE,
    _RARE_BITS,
    Draw,
    Drawer,
    _first_bytes,
    _gumbel,
    _words,
    draw,
    draw_key,
    gumbel_noise,
)


def noise(
    seed: tuple[int, ...] = (0,), path: tuple[int, ...] = (0,), position: int = 0, count: int = 1
) -> npt.NDArray[np.float64]:
    return gumbel_noise(draw_key(seed, path, position), np.arange(count))


DRAWERS: list[Drawer] = [draw]
if (library := native.build().library) is not None:
    DRAWERS.append(NativeDraw(library))


def uniform(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel values as uniform ones, by their distribution function."""
    probs: npt.NDArray[np.float64] = np.exp(-np.exp(-values))
    return probs


def chi_square(counts: npt.NDArray[np.int64]) -> float:
    """Of equally probable cells, as standard deviations from what is expected."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def test_golden_values() -> None:
    """The same key draws the same noise in every version and on every machine: recorded runs stay replayable."""
    assert noise((7,), (0, 1), 5, 4) == pytest.approx(GOLDEN, rel=1e-12)


def test_distribution() -> None:
    values = uniform(noise(count=1 << 18))
    counts, _ = np.histogram(values, bins=256, range=(0, 1))
    assert abs(chi_square(counts)) < 4


GOLDEN = [2.0549158894197186, 0.2307365141311769, 0.8482787230979805, 3.897014586805339]

KEYS: list[dict[str, Any]] = [
    *({"seed": (0, 0)}, {"seed": (1,)}, {"seed": (2**63,)}, {"seed": (-1,)}, {"path": ()}, {"path": (1,)}),
    *({"path": (0, 0)}, {"path": (0, 1)}, {"position": 1}, {"position": 2**40}),
]


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_differ_in_one_field_are_independent(key: dict[str, Any]) -> None:
    here, there = uniform(noise(count=1 << 16)), uniform(noise(**key, count=1 << 16))
    counts, _, _ = np.histogram2d(here, there, bins=16, range=[(0, 1), (0, 1)])
    assert abs(chi_square(counts.astype(np.int64))) < 4


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 9, 64])
def test_neighbouring_ids_are_independent(lag: int) -> None:
    values = uniform(noise(count=1 << 17))
    counts, _, _ = np.histogram2d(values[:-lag], values[lag:], bins=16, range=[(0, 1), (0, 1)])
    assert abs(chi_square(counts.astype(np.int64))) < 4


def test_one_id_over_successive_positions_is_independent() -> None:
    values = uniform(np.array([noise(position=position)[0] for position in range(1 << 13)]))
    counts, _, _ = np.histogram2d(values[:-1], values[1:], bins=8, range=[(0, 1), (0, 1)])
    assert abs(chi_square(counts.astype(np.int64))) < 4


@given(st.sets(st.integers(0, 500), min_size=1))
def test_the_noise_of_an_id_does_not_depend_on_the_others(token_ids: set[int]) -> None:
    ids = np.array(sorted(token_ids))
    np.testing.assert_array_equal(gumbel_noise(draw_key((3,), (0,), 9), ids), noise((3,), (0,), 9, 501)[ids])


NUMBERS = st.lists(st.integers(-(2**70), 2**70), max_size=3).map(tuple)


@given(NUMBERS, NUMBERS, st.integers(0, 2**40), NUMBERS, NUMBERS, st.integers(0, 2**40))
def test_different_arguments_have_different_keys(
    seed: tuple[int, ...],
    path: tuple[int, ...],
    position: int,
    seed2: tuple[int, ...],
    path2: tuple[int, ...],
    position2: int,
) -> None:
    assert (draw_key(seed, path, position) == draw_key(seed2, path2, position2)) == (
        (seed, path, position) == (seed2, path2, position2)
    )
    assert 0 <= draw_key(seed, path, position) < 2**128


def test_numpy_integers_are_the_samedraw_key() -> None:
    assert draw_key((np.int64(5),), (np.int32(1),), np.int16(2)) == draw_key((5,), (1,), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_the_extreme_words_give_finite_noise(word: int) -> None:
    assert -3.7 < _gumbel(np.array([word], dtype=np.uint64))[0] < 36.8


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, _FEW, _FEW + 1, 5_000, 5_001, 50_000]),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0, 5.0, 30.0, 1e30]),
    st.sampled_from([5e-324, 1e-30, 0.01, 0.8, 1.0, 100.0, 1e308]),
    st.sets(st.sampled_from(["tied", "masked", "some ids"])),
)
@settings(max_examples=5 * settings().max_examples)
def test_the_largest_sum_is_found_without_all_of_the_noise(
    seed: int, count: int, spread: float, temperature: float, kinds: set[str]
) -> None:
    """Flat and steep logits, some at -inf, some equal; all ids, or some, in any order."""
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal(count) * spread).astype(np.float32)
    if "tied" in kinds:
        logits = np.round(logits)
    if "masked" in kinds:
        logits[1::7] = -np.inf
    ids = generator.permutation(count) * 3 if "some ids" in kinds else np.arange(count)
    with np.errstate(over="ignore"):
        scores = (logits.astype(np.float64) - float(logits.max())) / temperature
    key = draw_key((seed,), (0,), 4)
    expected = int(np.argmax(scores + gumbel_noise(key, ids)))
    before = logits.copy()
    with np.errstate(all="raise", under="ignore"):
        its = Draw(logits=logits, temperature=temperature, key=key, ids=ids if "some ids" in kinds else None)
        for drawer in DRAWERS:
            assert drawer([its]) == [expected]
    np.testing.assert_array_equal(logits, before)


def test_an_id_that_is_not_rare_gets_little_noise() -> None:
    """The bound behind it: below the first rare word, at most 7 log 2; from it on, at least nearly so."""
    first = np.uint64(_RARE << 56)
    below, above = _gumbel(np.array([first - np.uint64(1), first]))
    assert below < _RARE_BITS * math.log(2)
    assert above == pytest.approx(_RARE_BITS * math.log(2), abs=0.01)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1_001])
def test_first_bytes_of_some_are_those_of_all(count: int) -> None:
    ids = np.random.default_rng(0).permutation(count)
    np.testing.assert_array_equal(_first_bytes(2**100 + 5, count)[ids], _first_bytes(2**100 + 5, ids))


@pytest.mark.parametrize("shift", [0, 8, 40, 48, 56])
def test_every_byte_of_the_words_is_uniform(shift: int) -> None:
    ids, key = np.arange(1 << 18), draw_key((0,), (0,), 0)
    found = (_words(key, ids, _first_bytes(key, ids)) >> np.uint64(shift)).astype(np.uint8)
    assert abs(chi_square(np.bincount(found, minlength=256))) < 4


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 7, 8, 1_000, 5_001, 50_000]),
    st.sampled_from([0.0, 1e-3, 1.0, 5.0, 30.0, 1e30]),
    st.sampled_from([0.0, 5e-324, 1e-7, 0.01, 0.8, 1.0, 100.0, 1e7, 1e308]),
    st.sampled_from([1.0, 1 - 1e-16, 0.95, 0.5, 0.1, 1e-9]),
    st.sampled_from([0.0, 1e-300, 0.05, 0.5, 1.0]),
    st.sets(st.sampled_from(["tied", "masked", "some ids"])),
)
@settings(max_examples=5 * settings().max_examples)
def test_every_drawer_draws_the_same(
    seed: int, count: int, spread: float, temperature: float, top_p: float, min_p: float, kinds: set[str]
) -> None:
    """Alone and among others, whose logits lie apart, on any number of threads."""
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((3, count)) * spread).astype(np.float32)
    if "tied" in kinds:
        logits = np.round(logits)
    if "masked" in kinds:
        logits[:, 1::7] = -np.inf
    ids = generator.permutation(count) * 3 if "some ids" in kinds else None
    draws = [
        Draw(logits=row, temperature=temperature, top_p=top_p, min_p=min_p, key=draw_key((seed,), (0,), i), ids=ids)
        for i, row in enumerate(logits)
    ]
    expected, before = draw(draws), logits.copy()
    default = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for drawer in DRAWERS:
                assert drawer(draws) == expected
                assert [drawer([its])[0] for its in draws[::-1]] == expected[::-1]
                assert drawer([]) == []
    finally:
        torch.set_num_threads(default)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.skipif(len(DRAWERS) < 2, reason="no native library")
@pytest.mark.parametrize(
    ("logits", "ids"),
    [
        (np.zeros(4), None),
        (np.zeros((4, 2), np.float32)[:, 0], None),
        (np.zeros(0, np.float32), None),
        (np.zeros(4, np.float32), np.arange(3)),
        (np.zeros(4, np.float32), np.arange(4, dtype=np.int32)),
        (np.zeros(4, np.float32), np.arange(8)[::2]),
        (np.full(4, -np.inf, np.float32), None),
        (np.array([0, np.inf], np.float32), None),
    ],
    ids=str,
)
def test_what_is_no_row_is_refused(logits: Any, ids: Any) -> None:
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
        with pytest.raises(ValueError, match="logits of"):
            DRAWERS[1]([Draw(logits=logits, ids=ids, temperature=temperature, top_p=top_p)])
