"""Threads: set for the process, and a warning where idle ones spin. In processes of their own: libgomp reads once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixrt.runtime import Engine, InvalidRequest
from radixrt.runtime.testing import HashModel

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = """
import torch
import radixrt as rx
from radixrt.runtime.testing import HashModel
for _ in range(3):
    rx.Engine(HashModel(), num_pages=8, threads={threads}).close()
print(torch.get_num_threads())
"""


def run(threads: int, policy: str | None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    env |= {"PYTHONPATH": str(SOURCE)} | ({} if policy is None else {"OMP_WAIT_POLICY": policy})
    program = [sys.executable, "-P", "-c", PROGRAM.format(threads=threads)]
    return subprocess.run(program, env=env, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize(("threads", "policy", "warned"), [(2, None, True), (2, "passive", False)])
def test_spinning_threads_are_warned_of_once(threads: int, policy: str | None, warned: bool) -> None:  # noqa: FBT001
    done = run(threads, policy)
    assert done.stdout.split() == [str(threads)]
    assert done.stderr.count("RuntimeWarning: OMP_WAIT_POLICY was") == warned, done.stderr
    assert done.stderr.count("Set OMP_WAIT_POLICY=PASSIVE before Python starts") == warned, done.stderr


def test_an_engine_sets_the_threads_of_the_process() -> None:
    before = torch.get_num_threads()
    try:
        Engine(HashModel(), num_pages=8, threads=1).close()
        assert torch.get_num_threads() == 1
        Engine(HashModel(), num_pages=8).close()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2", 10**6])
def test_a_wrong_number_is_refused(threads: object) -> None:
    with pytest.raises(InvalidRequest, match="threads"):
        Engine(HashModel(), num_pages=8, threads=threads)  # type: ignore[arg-type]
