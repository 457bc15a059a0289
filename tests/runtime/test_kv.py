"""The KV pool's copies on CUDA, on fakes: a stream of their own, behind the steps before, between two events."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from radixrt.kernels.backend import LayerShape
from radixrt.kernels.cpu.torch_attention import TorchAttention
from radixrt.runtime.fences import CudaFence
from radixrt.runtime.kv import KVPool


class Cuda:
    """What the pool asks of `torch.cuda`, in the order it asks."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended = False

    def Stream(self, device: torch.device) -> Any:
        return self

    Event = Stream

    def __call__(self, **_: Any) -> Any:
        return self

    def current_stream(self, device: torch.device) -> str:
        return f"the current stream of {device}"

    def wait_stream(self, other: str) -> None:
        self.asked.append(f"wait for {other}")

    def stream(self, stream: Any) -> Any:
        self.asked.append("enter")
        return nullcontext()

    def record(self) -> None:
        self.asked.append("record")

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True

    def elapsed_time(self, end: Any) -> float:
        return 1500.0


def test_copies_on_cuda_are_queued_behind_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(TorchAttention(), 4, 2, torch.float32, torch.device("cpu"), num_host_pages=2)
    kv = pool.layer(0, LayerShape(1, 2, 3))
    kv.k[3] = 7.0
    cuda = Cuda()
    pool.device = torch.device("cuda")
    monkeypatch.setattr(cuda, "Event", lambda enable_timing: cuda, raising=False)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(pool.backend, "copy_pages", lambda *_: cuda.asked.append("copy"), raising=False)
    fence = pool.copy_out(np.array([3]), np.array([6]))
    assert isinstance(fence, CudaFence)
    assert cuda.asked == ["wait for the current stream of cuda", "enter", "record", "copy", "record"]
    assert not fence.done()
    fence.wait()
    assert fence.done()
    assert fence.seconds() == 1.5


def test_host_pages_follow_the_devices_and_have_their_layout() -> None:
    pool = KVPool(TorchAttention(), 4, 2, torch.float32, torch.device("cpu"), num_host_pages=2)
    kv = pool.layer(0, LayerShape(1, 2, 3))
    kv.k[3], kv.v[3] = 7.0, 8.0
    assert pool.copy_out(np.array([3, 1]), np.array([6, 5])).done()
    pool.poison_slots(np.array([6, 7, 10]))  # page 3, and the first slot of host page 5
    assert kv.k[3].isnan().all()
    assert pool.copy_in(np.array([6, 5]), np.array([2, 4])).done()
    assert (kv.k[2] == 7).all()
    assert (kv.v[2] == 8).all()
    assert [bool(slot.isnan().all()) for slot in kv.k[4]] == [True, False]
