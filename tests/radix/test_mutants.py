"""The suite is worth what it catches: every fault of `mutants.py` must be noticed by a short run of the driver.

Does not know how the cache works.
"""

from collections import Counter
from itertools import chain, count, islice
from pathlib import Path

import pytest

from radixrt.radix.testing import Disagreement, Simulation, drive

from .mutants import MUTANTS, Mutant

# num_pages, num_host_pages, page_size, seed, policy; each for NUM_OPERATIONS with every check
RUNS = [
    (9, 0, 4, 1, "lru"),
    (6, 3, 2, 2, "lru2"),
    (24, 0, 2, 3, "duel"),
    (4, 0, 1, 4, "lru2"),
    (9, 5, 4, 5, "duel"),
    (6, 0, 2, 6, "lru"),
    (12, 0, 4, 7, "lru2"),
    (24, 8, 2, 8, "lru"),
    (9, 5, 4, 9, "lru2"),
    (8, 3, 2, 10, "lru"),
]
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
    simulation.copy()
    simulation.confirm()
    simulation.finish()


def request(simulation: Simulation, tokens: list[int], priority: int = 0) -> None:
    """A sequence from open to close."""
    handle = simulation.open(namespace="", tokens=tokens, priority=priority)
    simulation.extend(handle=handle, tokens=tokens[len(simulation.tables[handle].tokens) :])
    simulation.publish(handle=handle, tail=False)
    simulation.close(handle=handle)


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
    simulation.evict(num_pages=2)
    simulation.finish()


def a_page_is_as_warm_as_what_continued_it() -> None:
    """9 is used between 1 and its continuation: by the times of 1 alone it would be the warmer one, under LRU-2."""
    for evict_all in (False, True):
        simulation = Simulation(num_pages=8, page_size=1, policy="lru2")
        first = simulation.open(namespace="", tokens=[])
        simulation.extend(handle=first, tokens=[1])
        simulation.publish(handle=first, tail=False)
        request(simulation, [9])
        simulation.extend(handle=first, tokens=[2])
        simulation.publish(handle=first, tail=False)
        simulation.close(handle=first)
        if evict_all:  # what comes back has the last use that its ghost remembers
            simulation.evict(num_pages=3)
            request(simulation, [1])
            request(simulation, [9])
        else:
            request(simulation, [1, 2])
            holder = simulation.open(namespace="", tokens=[9])
            simulation.evict(num_pages=1)
            simulation.close(handle=holder)
        simulation.evict(num_pages=1)
        simulation.finish()


def a_page_is_as_warm_as_what_forks_made_of_it() -> None:
    """2 and 3 continue 1 in two forks, each used once; when both are gone, 1 is as warm as the later one."""
    simulation = Simulation(num_pages=8, page_size=1, policy="lru2")
    parent = simulation.open(namespace="", tokens=[])
    simulation.extend(handle=parent, tokens=[1])
    simulation.publish(handle=parent, tail=False)
    child, other = simulation.fork(handle=parent), simulation.open(namespace="", tokens=[])
    for handle, token in ((parent, 2), (other, 9), (child, 3)):
        simulation.extend(handle=handle, tokens=[token])
        simulation.publish(handle=handle, tail=False)
    simulation.close(handle=child)
    simulation.evict(num_pages=1)
    simulation.close(handle=parent)
    simulation.close(handle=other)
    simulation.evict(num_pages=2)
    simulation.finish()


def tails_are_told_apart() -> None:
    """The live tail that agrees furthest is hit; a cached one that ends what is dropped goes with it."""
    simulation = Simulation(num_pages=8, page_size=4)
    handles = [simulation.open(namespace="", tokens=[]) for _ in range(2)]
    for handle, tokens in zip(handles, ([1, 2], [1, 2, 3]), strict=True):
        simulation.extend(handle=handle, tokens=tokens)
        simulation.publish(handle=handle, tail=False)
    simulation.match(namespace="", tokens=[1, 2, 3, 4])
    simulation.publish(handle=handles[1], tail=True)
    for handle in handles:
        simulation.close(handle=handle)
    for tokens in ([1, 2], [1, 2, 3]):
        simulation.drop(namespace="", tokens=tokens, keep_len=0)
    request(simulation, [*range(16, 28)])
    simulation.drop(namespace="", tokens=[*range(16, 28)], keep_len=5)
    simulation.finish()


def a_page_beside_keeps_what_is_to_be_kept() -> None:
    """The page of 4 goes, although 4 is to stay: another begins with it; then that one is alone, and stays."""
    simulation = Simulation(num_pages=8, page_size=4)
    for tokens in ([*range(8)], [*range(5), 9, 9, 9]):
        request(simulation, tokens)
    simulation.drop(namespace="", tokens=[*range(8)], keep_len=6)
    for tokens in ([*range(8)], [*range(5), 9, 9, 9]):
        simulation.drop(namespace="", tokens=tokens, keep_len=5)
    simulation.finish()


def reset_while_a_copy_waits() -> None:
    simulation = Simulation(num_pages=8, page_size=4)
    parent = simulation.open(namespace="", tokens=[])
    simulation.extend(handle=parent, tokens=[1, 2])
    simulation.publish(handle=parent, tail=False)
    child = simulation.fork(handle=parent)
    simulation.extend(handle=child, tokens=[3])
    for handle in (parent, child):
        simulation.close(handle=handle)
    simulation.reset()
    simulation.finish()


def evict_by_priority() -> None:
    """A leaf whose beginning has a higher priority than its end: between the two goes a warmer one of low priority."""
    simulation = Simulation(num_pages=4, page_size=1)
    request(simulation, [1], priority=1)
    request(simulation, [1, 2])
    request(simulation, [3])
    simulation.evict(num_pages=2)
    simulation.finish()


def duel_changes_its_mind() -> None:
    """Three sequences come back between scans, which only LRU-2 survives; then each comes back once and soon."""
    simulation = Simulation(num_pages=10, num_host_pages=2, page_size=2, policy="duel", check_every=10)
    for tokens in ([5, 5], [6, 6]):
        request(simulation, tokens)
    swap_out(simulation, 2)  # a second order to sort anew
    fresh = count(10)
    scans = [[*range(3), *islice(fresh, 14)] for _ in range(6)]
    for token in chain.from_iterable(scans):
        request(simulation, [1000, 1000, token, token])
    assert simulation.cache.stats().policy == "duel: lru2"
    simulation.evict(num_pages=10**9)
    for tokens in ([7, 7], [7, 7, 8, 8], [9, 9]):
        request(simulation, tokens)
    simulation.evict(num_pages=2)  # what was used once: 8 and 9, not the 7 before 8
    for token in chain.from_iterable(list(islice(fresh, 3)) * 2 for _ in range(16)):
        request(simulation, [1000, 1000, token, token])
    assert simulation.cache.stats().policy == "duel: lru"
    simulation.finish()


def put(simulation: Simulation, *sequences: list[int], tail: bool = False) -> None:
    """Each of these from open to close."""
    for tokens in sequences:
        handle = simulation.open(namespace="", tokens=tokens)
        simulation.extend(handle=handle, tokens=tokens[len(simulation.tables[handle].tokens) :])
        simulation.publish(handle=handle, tail=tail)
        simulation.close(handle=handle)


def swap_out(simulation: Simulation, num_pages: int) -> None:
    simulation.swap_out(num_pages=num_pages)
    simulation.end_swaps(first=0, count=num_pages, failed=False)


def match_past_the_device() -> None:
    """A live tail beside host pages: neither hides the other; a page computed anew takes the place of its like."""
    simulation = Simulation(num_pages=8, page_size=4, num_host_pages=8)
    put(simulation, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], tail=True)
    swap_out(simulation, 2)
    live = simulation.open(namespace="", tokens=[1, 2, 3, 4])
    simulation.extend(handle=live, tokens=[5, 6])
    simulation.publish(handle=live, tail=False)
    for tokens in ([5, 6, 7, 8, 9, 9, 9], [5, 6, 1], [5, 6], [5, 6, 7]):
        simulation.match(namespace="", tokens=[1, 2, 3, 4, *tokens])
    simulation.extend(handle=live, tokens=[7, 8, 9, 9])
    simulation.publish(handle=live, tail=True)
    simulation.finish()


def branches_in_host_memory() -> None:
    """What hangs below device pages goes with them, splits and merges, and warms them when it comes back."""
    simulation = Simulation(num_pages=8, page_size=1, num_host_pages=2)
    put(simulation, [1, 2, 3], [1, 2, 4])
    swap_out(simulation, 2)
    simulation.swap_in(namespace="", tokens=[1, 2, 3], max_pages=None)
    simulation.end_swaps(first=0, count=1, failed=True)
    swap_out(simulation, 1)  # for which a branch is dropped, and the other merges
    simulation.finish()
    put(simulation, [1, 2, 3], [1, 2, 4])
    swap_out(simulation, 2)
    simulation.evict(num_pages=1)
    simulation.finish()
    put(simulation, [1, 2, 3, 4])
    swap_out(simulation, 2)
    put(simulation, [1, 2, 5])  # splits where the host begins
    put(simulation, [1, 2, 3, 4])
    simulation.finish()
    put(simulation, [1, 2], [1, 3])
    swap_out(simulation, 2)
    put(simulation, [1, 4])
    simulation.evict(num_pages=1)  # 1 is as warm as 4 was, with two branches in host memory still
    simulation.finish()


def what_comes_back_is_used() -> None:
    """Asking for it is a use of its path, whatever becomes of the copies; the first hit of it counts as the host's."""
    simulation = Simulation(num_pages=8, page_size=2, num_host_pages=4)
    put(simulation, [1, 1, 2, 2], [9, 9])
    swap_out(simulation, 1)
    simulation.swap_in(namespace="", tokens=[1, 1, 2, 2], max_pages=None)
    simulation.end_swaps(first=0, count=1, failed=True)
    simulation.evict(num_pages=1)  # 9, which is colder than 1 now
    simulation.swap_in(namespace="", tokens=[1, 1, 2, 2], max_pages=None)
    simulation.end_swaps(first=0, count=1, failed=False)
    for tokens in ([1, 1, 2], [1, 1, 2, 2]):
        simulation.close(handle=simulation.open(namespace="", tokens=tokens))
    swap_out(simulation, 1)
    simulation.swap_in(namespace="", tokens=[1, 1, 2, 2], max_pages=None)
    simulation.end_swaps(first=0, count=1, failed=False)
    simulation.close(handle=simulation.open(namespace="", tokens=[1, 1, 2, 2]))
    simulation.finish()


def pages_move_with_their_heat() -> None:
    """Of two host pages the one used once makes way, whichever came first."""
    for policy in ("lru", "lru2", "duel"):
        simulation = Simulation(num_pages=8, page_size=1, num_host_pages=2, policy=policy)
        put(simulation, [1], [2], [1])
        swap_out(simulation, 2)
        put(simulation, [3])
        swap_out(simulation, 1)
        simulation.finish()
    simulation = Simulation(num_pages=8, page_size=1, num_host_pages=1, policy="lru2")
    for token in (1, 2):
        put(simulation, [token])
        swap_out(simulation, 1)
    put(simulation, [1], [3])  # 1 was used before, as its ghost remembers from host memory
    simulation.evict(num_pages=1)
    simulation.finish()


def copies_overtake_one_another() -> None:
    """A device page never comes after a host page, whatever ends first and whatever was published meanwhile."""
    simulation = Simulation(num_pages=8, page_size=1, num_host_pages=8)
    put(simulation, [1, 2])
    simulation.swap_out(num_pages=2)
    put(simulation, [1, 2, 3], [1, 2, 4])
    simulation.end_swaps(first=0, count=1, failed=False)
    simulation.end_swaps(first=0, count=1, failed=False)
    for _ in range(3):
        swap_out(simulation, 4)
    simulation.swap_in(namespace="", tokens=[1, 2, 3], max_pages=None)
    for first in (2, 1, 0):
        simulation.end_swaps(first=first, count=1, failed=False)
    simulation.finish()


def evict_while_copies_run() -> None:
    """Eviction goes past what is under way, takes nothing that would not help, and follows inherited heat."""
    simulation = Simulation(num_pages=8, page_size=1, num_host_pages=8)
    put(simulation, [1, 2, 3, 4])
    simulation.swap_out(num_pages=2)
    simulation.evict(num_pages=1)
    reader = simulation.open(namespace="", tokens=[1])
    simulation.evict(num_pages=10)
    simulation.close(handle=reader)
    simulation.finish()
    put(simulation, [1, 2, 3])
    branch = simulation.open(namespace="", tokens=[1, 2])
    put(simulation, [9])
    simulation.extend(handle=branch, tokens=[4])
    simulation.publish(handle=branch, tail=False)
    simulation.close(handle=branch)
    simulation.swap_out(num_pages=3)
    simulation.end_swaps(first=1, count=1, failed=True)
    simulation.end_swaps(first=0, count=2, failed=False)
    simulation.evict(num_pages=1)
    simulation.finish()


def swap_what_others_use() -> None:
    """Readers and other copies keep a page where it is; what is picked is not dropped to make room for it."""
    simulation = Simulation(num_pages=8, page_size=1, num_host_pages=2)
    put(simulation, [1, 2])
    swap_out(simulation, 1)
    put(simulation, [5], [6, 7])
    simulation.swap_out(num_pages=3)  # for which the host page behind one of them is dropped
    simulation.reset()
    simulation.finish()
    simulation = Simulation(num_pages=8, page_size=1, num_host_pages=8)
    put(simulation, [1], [2, 3])
    simulation.swap_out(num_pages=2)
    reader = simulation.open(namespace="", tokens=[1])
    simulation.evict(num_pages=1)
    simulation.end_swaps(first=0, count=2, failed=False)
    simulation.close(handle=reader)
    swap_out(simulation, 8)
    for _ in range(2):
        simulation.swap_in(namespace="", tokens=[1], max_pages=None)
    simulation.finish()
    simulation = Simulation(num_pages=2, page_size=1, num_host_pages=2)
    put(simulation, [1, 2])
    swap_out(simulation, 1)
    simulation.extend(handle=simulation.open(namespace="", tokens=[]), tokens=[9])
    simulation.swap_in(namespace="", tokens=[1, 2], max_pages=None)  # no room but for its own path
    simulation.finish()


def run() -> None:
    branch_between_two_steps()
    evict_past_held_leaves()
    a_page_beside_keeps_what_is_to_be_kept()
    a_page_is_as_warm_as_what_continued_it()
    a_page_is_as_warm_as_what_forks_made_of_it()
    evict_by_priority()
    tails_are_told_apart()
    reset_while_a_copy_waits()
    match_past_the_device()
    branches_in_host_memory()
    what_comes_back_is_used()
    pages_move_with_their_heat()
    copies_overtake_one_another()
    evict_while_copies_run()
    swap_what_others_use()
    for num_pages, num_host_pages, page_size, seed, policy in RUNS:
        sizes = {"num_pages": num_pages, "num_host_pages": num_host_pages, "page_size": page_size}
        drive(num_operations=NUM_OPERATIONS, **sizes, seed=seed, policy=policy)
    duel_changes_its_mind()


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
