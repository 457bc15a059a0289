"""The Triton kernels compiled for GPUs that are not there: nothing spills, and tall tiles get the widest product.

A slice of what benchmarks/triton_resources.py compiles, by that script: no process both compiles and interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory, profile: str) -> list[dict[str, Any]]:
    """What the script found of each kernel: a slice, or all configurations in the deep profile."""
    found = tmp_path_factory.mktemp("triton") / "resources.json"
    command = [sys.executable, "benchmarks/triton_resources.py", "--json", str(found)]
    command += ["--quick"] if profile == "ci" else []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
    cells: list[dict[str, Any]] = json.loads(found.read_text())["cells"]
    return cells


def test_every_kernel_compiles_without_spills(cells: list[dict[str, Any]]) -> None:
    assert len(cells) >= 30
    assert {cell["section"].partition(",")[0] for cell in cells} == {"sm_80", "sm_90"}
    assert [cell for cell in cells if cell["value"] != 0 or not 0 < cell["registers"] <= 255] == []


def test_products_run_on_tensor_cores(cells: list[dict[str, Any]]) -> None:
    """All but those of float32, which are exact; those of 64 rows on sm_90 as warp groups."""
    kinds = {
        (cell["section"][:5], *cell["name"].split(", ")[:2]): cell["mma"] for cell in cells if "rows" in cell["name"]
    }
    for (capability, heads, rows), mma in kinds.items():
        wide = capability == "sm_90" and rows == "64 rows"
        assert mma == ("fma" if heads.startswith("fp32") else "wgmma" if wide else "mma.sync"), (
            capability,
            heads,
            rows,
        )


def test_a_program_fits_on_the_smaller_gpus_of_its_generation(cells: list[dict[str, Any]]) -> None:
    """A program may have 99 KiB of shared memory on sm_86, sm_89 and sm_120, which were not compiled for."""
    assert max(cell["shared"] for cell in cells) <= 99 << 10
