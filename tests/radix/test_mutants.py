"""The suite is worth what it catches: every fault of `mutants.py` must be noticed by a short run of the driver.

Does not know how the cache works.
"""

from collections import Counter
from pathlib import Path

import pytest

from radixrt.radix.testing import Disagreement, Simulation, drive

from .mutants import MUTANTS, Mutant

# num_pages, page_size, seed; each for NUM_OPERATIONS with every check
RUNS = [(9, 4, 1), (6, 2, 2), (24, 2, 3), (4, 1, 4), (9, 4, 5), (6, 2, 6), (12, 4, 7), (24, 2, 8)]
NUM_OPERATIONS = 400


def branch_between_two_steps() -> None:
    """Nobody reads a page that waits for its copy: neither a match nor the copy of a copy."""
    simulation = Simulation(num_pages=8, page_size=4)
    parent = simulation.open(namespace="", tokens=[])
    simulation.extend(handle=parent, tokens=[1, 2])
    simulation.publish(handle=parent, tail=False)
    child = simulation.fork(handle=parent)
    simulation.extend(handle=child, tokens=[3])
    simulation.extend(handle=simulation.fork(handle=child), tokens=[4])
    simulation.close(handle=parent)
    simulation.match(namespace="", tokens=[1, 2, 3])
    simulation.finish()


def evict_past_held_leaves() -> None:
    """The warmest branch is evicted while the colder ones are held; what stays of its path is as warm as it was."""
    simulation = Simulation(num_pages=8, page_size=1)
    first = simulation.open(namespace="", tokens=[])
    simulation.extend(handle=first, tokens=[1, 2])
    simulation.publish(handle=first, tail=False)
    warmest, other = simulation.open(namespace="", tokens=[1]), simulation.open(namespace="", tokens=[])
    for handle, token in ((other, 5), (warmest, 3)):
        simulation.extend(handle=handle, tokens=[token])
        simulation.publish(handle=handle, tail=False)
    simulation.close(handle=warmest)
    simulation.evict(num_pages=1)
    simulation.close(handle=first)
    simulation.close(handle=other)
    simulation.evict(num_pages=1)
    simulation.finish()


def run() -> None:
    branch_between_two_steps()
    evict_past_held_leaves()
    for num_pages, page_size, seed in RUNS:
        drive(num_operations=NUM_OPERATIONS, num_pages=num_pages, page_size=page_size, seed=seed)


def test_the_cache_itself_survives() -> None:
    run()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_fault_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # each kill writes its replay file
    # Any exception is notice enough: some faults break the cache before there is something to compare.
    with mutant.in_place(), pytest.raises(Exception):  # noqa: B017, PT011
        run()


def test_names_are_unique() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_a_fault_that_no_longer_fits_is_no_kill() -> None:
    stale = Mutant("stale", type(MUTANTS[0]), "__str__", "no such text", "")
    with pytest.raises(LookupError, match="stale"), stale.in_place():
        raise AssertionError("unreachable")
    assert not issubclass(Disagreement, LookupError)
