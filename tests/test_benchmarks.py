"""What benchmarks know of the runtime by name is there: nothing else runs them before somebody wants a number."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter

import pytest

import radixrt as rx
from radixrt.runtime.testing import HashModel

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_phases_of_a_step_are_the_runtimes() -> None:
    phases_of = import_module("_phases").watch
    with rx.Engine(HashModel(), num_pages=64) as engine:
        engine.submit([1, 2, 3], rx.SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True))
        with phases_of(engine, perf_counter) as phases:
            engine.step()
            taken = phases.take()
    never = {name for name, seconds in taken.items() if not seconds}
    assert never == {"detokenising"}  # a HashModel has no tokenizer


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path) -> None:
    assert callable(import_module(path.stem).main)
    sys.modules.pop(path.stem)


def test_every_benchmark_is_explained() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    for path in BENCHMARKS.glob("[a-z]*.py"):
        assert f"\n| `{path.name}` |" in readme, f"{path.name} has no row"
        assert f"\n## {path.name}\n" in readme or path.stem == "triton_resources", f"{path.name} has no section"
