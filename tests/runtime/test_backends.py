"""Which attention runs: the native kernel where it serves, plain torch elsewhere, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from radixrt.kernels.backend import LayerShape
from radixrt.kernels.cpu import native
from radixrt.runtime import Engine, InvalidRequest, ModelError, SamplingParams, backends, load_model
from radixrt.runtime.backends import CPU_KERNEL, choose_backend
from radixrt.runtime.transformer import TransformerModel

from . import tiny

SOURCE = Path(__file__).resolve().parents[2] / "src"
CPU = torch.device("cpu")
SHAPE = LayerShape(2, 64, 64)
needs_compiler = pytest.mark.skipif(native.build().library is None, reason=f"no build: {native.build().reason}")


@pytest.fixture(autouse=True)
def no_kernel_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_KERNEL, raising=False)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [8, 16, 128])
def test_native_runs_where_it_serves(dtype: torch.dtype, page_size: int) -> None:
    assert choose_backend(CPU, dtype, page_size, [SHAPE]).backend.name == "native"


@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_compiler), "torch"])
def test_a_pool_that_no_machine_has_is_refused(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNEL, kernel)
    model = TransformerModel(tiny.build(tiny.wide("llama"), dtype=torch.float32))
    with pytest.raises(InvalidRequest, match=r"kv_memory: a pool of .* pages cannot be allocated"):
        Engine(model, num_pages=2**31 - 1, page_size=128)


UNSERVED = [
    (torch.float64, 16, SHAPE, "float64"),
    (torch.float32, 4, SHAPE, "page size 4"),
    (torch.float32, 24, SHAPE, "page size 24"),
    (torch.float32, 16, LayerShape(2, 16, 16), "head dimension 16"),
    (torch.float32, 16, LayerShape(2, 72, 72), "head dimension 72"),
    (torch.float32, 16, LayerShape(2, 64, 32), "values 32"),
]


@pytest.mark.parametrize(("dtype", "page_size", "shape", "word"), UNSERVED)
def test_elsewhere_torch_runs_and_says_why(dtype: torch.dtype, page_size: int, shape: LayerShape, word: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = choose_backend(CPU, dtype, page_size, [SHAPE, shape])
    assert chosen.backend.name == "torch"
    assert word in chosen.reason
    with pytest.raises(ModelError, match=f"native attention kernel was asked for and cannot serve: .*{word}"):
        choose_backend(CPU, dtype, page_size, [SHAPE, shape], asked="native")


def test_the_environment_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNEL, "torch")
    assert choose_backend(CPU, torch.float32, 16, [SHAPE]).backend.name == "torch"
    monkeypatch.setenv(CPU_KERNEL, "native")
    with pytest.raises(ModelError, match="cannot serve"):
        choose_backend(CPU, torch.float64, 16, [SHAPE])
    monkeypatch.setenv(CPU_KERNEL, "fast")
    with pytest.raises(ModelError, match="RADIXRT_CPU_KERNEL is 'fast'; it must be native or torch"):
        choose_backend(CPU, torch.float32, 16, [SHAPE])


def test_a_gpu_is_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert choose_backend(torch.device("cuda"), torch.float16, 16, [SHAPE]).backend.name == "triton"


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "radixrt.kernels.triton.backend", None)
    with pytest.raises(ModelError, match=r"attention needs triton, .*install radixrt\[gpu\]"):
        choose_backend(torch.device("cuda"), torch.float16, 16, [SHAPE])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "nonsense"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ModelError, match="was asked for"):
        load_model("smollm2-135m", device=device)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    native.build.cache_clear()
    backends._warn_unbuilt.cache_clear()
    yield
    native.build.cache_clear()


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_without_a_compiler_the_same_tokens_come_from_torch(name: str, request: pytest.FixtureRequest) -> None:
    """One warning line, however many engines are made."""
    prompts, params = [[5, 6, 7] * 9, [5, 6, 7, 8]], SamplingParams(max_tokens=12, temperature=0.0)
    model = TransformerModel(tiny.build(tiny.wide(name), dtype=torch.float32))
    with Engine(model, num_pages=32) as engine:
        expected = [output.choices[0].token_ids for output in engine.generate(prompts, params)]
    assert model.describe()["attention"].startswith("native")
    request.getfixturevalue("no_compiler")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with Engine(model, num_pages=32) as engine:
                assert [output.choices[0].token_ids for output in engine.generate(prompts, params)] == expected
    assert len(caught) == 1
    assert str(caught[0].message).startswith("attention runs in plain torch, slower")
    assert "\n" not in str(caught[0].message)
    assert "/nonexistent/c++" in str(caught[0].message)
    assert model.describe()["attention"].startswith("torch")


PROGRAM = """
import torch
from radixrt.kernels.backend import LayerShape
from radixrt.runtime.backends import choose_backend
for _ in range(2):
    print(choose_backend(torch.device("cpu"), torch.float32, 16, [LayerShape(2, 64, 64)]).backend.name)
"""


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    """As a process meets it: nothing on the path, an empty cache."""
    env = os.environ | {"PYTHONPATH": str(SOURCE), "PATH": str(tmp_path), "RADIXRT_CACHE": str(tmp_path)}
    env.pop("CXX", None)
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["torch", "torch"]
    assert done.stderr.count("UserWarning: attention runs in plain torch") == 1, done.stderr
