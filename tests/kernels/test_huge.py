"""Zeros in huge pages: what `torch.zeros` gives, errors too, and memory that goes when they go."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from radixrt.kernels.cpu.huge import zeros

SIZES = [(0,), (3, 5), (2**19,), (3, 700, 1000), (2**20 + 1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_they_are_zeros_to_write_to(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made, expected = zeros(*shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    assert made.is_contiguous()
    assert torch.equal(made, expected)
    made += 1
    assert torch.equal(made, expected + 1)


def test_what_no_machine_has_is_refused_as_by_torch() -> None:
    for size in (2**46, 2**61):
        with pytest.raises(RuntimeError):
            zeros(size, dtype=torch.float32)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells so")
def test_memory_is_taken_when_written_and_given_back() -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size, slack = 2**28, 2**26
    before = resident()
    made = zeros(size, dtype=torch.bfloat16)
    assert resident() < before + slack
    made.fill_(1)
    assert resident() > before + 2 * size - slack
    view = made[5:7]
    del made
    assert bool((view == 1).all())
    del view
    assert resident() < before + slack
