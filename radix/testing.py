"""The public test kit of the cache: strategies, a state machine, a seeded driver, replay of recorded operations.

Does not know how the cache works, and is the only module of this package that needs hypothesis.

    from radixrt.radix.testing import RadixCacheMachine
    TestCache = RadixCacheMachine.TestCase            # every operation against a reference, everything checked
    drive(num_operations=10_000, num_pages=24, page_size=4, seed=0)
    replay_operations("failure.jsonl")                # what a failing example or drive wrote

To test a cache of your own, override `RadixCacheMachine.make_simulation` (`Simulation(..., make_cache=...)`).
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import note, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ._driver import Driver
from ._expected import Disagreement
from ._simulation import OPERATIONS, Simulation
from .policy import POLICIES

__all__ = [
    "Disagreement",
    "Driver",
    "RadixCacheMachine",
    "Simulation",
    "drive",
    "page_sizes",
    "policies",
    "pool_sizes",
    "prefix_families",
    "replay_operations",
    "token_sequences",
]

T = TypeVar("T")


def page_sizes() -> st.SearchStrategy[int]:
    """Tokens per page: 1, 2, 4 or 16."""
    return st.sampled_from((1, 2, 4, 16))


def pool_sizes() -> st.SearchStrategy[int]:
    """Pages in a pool, 4 to 64: few enough that running out is common."""
    return st.integers(4, 64)


def policies() -> st.SearchStrategy[str]:
    """What ranks pages for eviction, by name."""
    return st.sampled_from(sorted(POLICIES))


def token_sequences(*, page_size: int, alphabet: int = 2, max_runs: int = 5) -> st.SearchStrategy[list[int]]:
    """Sequences of at most `max_runs` runs of one token each, over token ids [0, alphabet).

    Runs are one or two tokens, a page, or one token less or more than a page, so that two independent draws often
    agree up to, just before or just behind the end of a page.
    """
    lengths = sorted({1, 2, max(1, page_size - 1), page_size, page_size + 1})
    runs = st.tuples(st.integers(0, alphabet - 1), st.sampled_from(lengths))
    return st.lists(runs, max_size=max_runs).map(
        lambda drawn: [token for token, length in drawn for _ in range(length)]
    )


@st.composite
def prefix_families(draw: st.DrawFn, *, page_size: int, alphabet: int = 2, max_size: int = 8) -> list[list[int]]:
    """Lists of sequences in which each later one starts as an earlier one, cut anywhere (also inside a page)."""
    sequences = token_sequences(page_size=page_size, alphabet=alphabet)
    family = [draw(sequences)]
    for _ in range(draw(st.integers(0, max_size - 1))):
        known = draw(st.sampled_from(family))
        family.append(known[: draw(st.integers(0, len(known)))] + draw(sequences))
    return family


def _of_machine(choose: Callable[["RadixCacheMachine"], st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """A strategy that depends on the state of the machine that draws from it."""
    return st.runner().flatmap(choose)


NAMESPACES = st.sampled_from(("", "tenant"))
SEQUENCES = _of_machine(lambda machine: machine.sequences)
SWAPPED = _of_machine(lambda machine: st.sampled_from(machine.simulation.swapped()))
RECENT = _of_machine(lambda machine: st.sampled_from(machine.simulation.recent))
HANDLES = _of_machine(lambda machine: st.sampled_from(list(machine.simulation.tables)))
PINS = _of_machine(lambda machine: st.sampled_from(list(machine.simulation.pins)))
CUTS = st.integers(0, 80)

has_tables = precondition(lambda machine: bool(machine.simulation.tables))
has_host = precondition(lambda machine: machine.simulation.num_host_pages > 0)
has_room = precondition(lambda machine: len(machine.simulation.tables) < machine.max_tables)


class RadixCacheMachine(RuleBasedStateMachine):
    """All operations of a cache in any order. A failure prints the path of a file for `replay_operations`."""

    max_tables = 8
    simulation: Simulation
    sequences: st.SearchStrategy[list[int]]

    def make_simulation(self, *, num_pages: int, page_size: int, num_host_pages: int, policy: str) -> Simulation:
        """What to test; override it to test a cache of your own."""
        return Simulation(num_pages=num_pages, page_size=page_size, num_host_pages=num_host_pages, policy=policy)

    @initialize(
        num_pages=pool_sizes(),
        page_size=page_sizes(),
        num_host_pages=st.sampled_from((0, 2, 5, 64)),
        alphabet=st.integers(2, 4),
        policy=policies(),
    )
    def start(self, num_pages: int, page_size: int, num_host_pages: int, alphabet: int, policy: str) -> None:
        self.simulation = self.make_simulation(
            num_pages=num_pages, page_size=page_size, num_host_pages=num_host_pages, policy=policy
        )
        self.sequences = token_sequences(page_size=page_size, alphabet=alphabet)
        self.failed = False

    def do(self, verb: str, **arguments: Any) -> Any:
        """One operation of the simulation; a failure is written down."""
        try:
            return getattr(self.simulation, verb)(**arguments)
        except Exception:
            self._write_down()
            raise

    def _write_down(self) -> None:
        self.failed = True
        path = Path(tempfile.gettempdir()) / f"radixrt-machine-{os.getpid()}.jsonl"
        self.simulation.save(path)
        note(f"replay_operations({str(path)!r}) repeats this")

    def _open(self, namespace: str, tokens: list[int], priority: int = 0) -> int:
        """Open `tokens` and ask for what is missing of them."""
        label = f"table {self.simulation.now}"
        handle: int = self.do("open", namespace=namespace, tokens=tokens, label=label, priority=priority)
        if rest := tokens[len(self.simulation.tables[handle].tokens) :]:
            self.do("extend", handle=handle, tokens=rest)
        return handle

    def _insert(self, namespace: str, tokens: list[int], *, tail: bool) -> None:
        handle = self._open(namespace, tokens)
        self.do("publish", handle=handle, tail=tail)
        self.do("close", handle=handle)

    # Caching ----------------------------------------------------------------------------------------------------

    @rule(namespace=NAMESPACES, tokens=SEQUENCES, tail=st.booleans())
    def insert(self, namespace: str, tokens: list[int], tail: bool) -> None:  # noqa: FBT001 - drawn by Hypothesis
        self._insert(namespace, tokens, tail=tail)

    @rule(known=RECENT, suffix=SEQUENCES, tail=st.booleans())
    def insert_extension(self, known: tuple[str, list[int]], suffix: list[int], tail: bool) -> None:  # noqa: FBT001
        self._insert(known[0], known[1] + suffix, tail=tail)

    @rule(known=RECENT, cut=CUTS, suffix=SEQUENCES, tail=st.booleans())
    def insert_divergence(self, known: tuple[str, list[int]], cut: int, suffix: list[int], tail: bool) -> None:  # noqa: FBT001
        namespace, tokens = known
        cut %= len(tokens) + 1
        other = [1 - min(1, token) for token in tokens[cut : cut + 1]]
        self._insert(namespace, tokens[:cut] + other + suffix, tail=tail)

    @rule(namespace=NAMESPACES, tokens=SEQUENCES)
    def match(self, namespace: str, tokens: list[int]) -> None:
        self.do("match", namespace=namespace, tokens=tokens)

    @rule(known=RECENT, cut=CUTS, suffix=SEQUENCES)
    def match_known(self, known: tuple[str, list[int]], cut: int, suffix: list[int]) -> None:
        namespace, tokens = known
        self.do("match", namespace=namespace, tokens=tokens[: cut % (len(tokens) + 1)] + suffix)

    @rule(num_pages=st.sampled_from((0, 1, 2, 64, 10**9)))
    def evict(self, num_pages: int) -> None:
        self.do("evict", num_pages=num_pages)

    @rule(known=RECENT, cut=CUTS, keep=CUTS)
    def drop(self, known: tuple[str, list[int]], cut: int, keep: int) -> None:
        """Any part of a recent path; to keep more than there is is refused."""
        namespace, tokens = known[0], known[1][: len(known[1]) - cut % (len(known[1]) + 1)]
        self.do("drop", namespace=namespace, tokens=tokens, keep_len=keep % (len(tokens) + 2))

    @precondition(lambda machine: len(machine.simulation.pins) < 3)
    @rule(known=RECENT, cut=CUTS)
    def pin(self, known: tuple[str, list[int]], cut: int) -> None:
        namespace, tokens = known
        self.do("pin", namespace=namespace, tokens=tokens[: cut % (len(tokens) + 1)])

    @precondition(lambda machine: bool(machine.simulation.pins))
    @rule(pin=PINS)
    def unpin(self, pin: int) -> None:
        self.do("unpin", pin=pin)

    @has_host
    @rule(num_pages=st.sampled_from((1, 2, 5, 10**9)))
    def swap_out(self, num_pages: int) -> None:
        self.do("swap_out", num_pages=num_pages)

    @has_host
    @rule(known=SWAPPED, cut=CUTS, max_pages=st.sampled_from((None, 1, 2)))
    def swap_in(self, known: tuple[str, list[int]], cut: int, max_pages: int | None) -> None:
        namespace, tokens = known
        self.do("swap_in", namespace=namespace, tokens=tokens[: len(tokens) - cut // 4], max_pages=max_pages)

    @precondition(lambda machine: bool(machine.simulation.device.swaps))
    @rule(first=st.integers(0, 3), count=st.sampled_from((1, 2, 64)), failed=st.sampled_from((False, False, True)))
    def end_swaps(self, first: int, count: int, failed: bool) -> None:  # noqa: FBT001
        self.do("end_swaps", first=first, count=count, failed=failed)

    @rule()
    def reset(self) -> None:
        self.do("reset")

    @precondition(lambda machine: machine.simulation.now % 8 == 0)  # seldom: most of what is tested needs a past
    @rule()
    def end_and_reset(self) -> None:
        self.do("finish")

    # Tables -----------------------------------------------------------------------------------------------------

    @has_room
    @rule(namespace=NAMESPACES, tokens=SEQUENCES, priority=st.integers(-1, 2))
    def open(self, namespace: str, tokens: list[int], priority: int) -> None:
        self._open(namespace, tokens, priority)

    @has_room
    @rule(known=RECENT, cut=CUTS, suffix=SEQUENCES, priority=st.integers(-1, 2))
    def open_known(self, known: tuple[str, list[int]], cut: int, suffix: list[int], priority: int) -> None:
        namespace, tokens = known
        self._open(namespace, tokens[: cut % (len(tokens) + 1)] + suffix, priority)

    @has_room
    @rule(known=RECENT, common=SEQUENCES, ours=SEQUENCES, theirs=SEQUENCES)
    def open_together(
        self, known: tuple[str, list[int]], common: list[int], ours: list[int], theirs: list[int]
    ) -> None:
        """Two requests of one step: identical, one a prefix of the other, or diverging anywhere."""
        namespace, tokens = known
        first, second = (self.do("open", namespace=namespace, tokens=tokens) for _ in range(2))
        rest = tokens[len(self.simulation.tables[first].tokens) :] + common
        if self.do("extend", handle=first, tokens=rest + ours):
            self.do("extend", handle=second, tokens=rest + theirs, leader=first)

    @has_tables
    @rule(handle=HANDLES, tokens=SEQUENCES)
    def extend(self, handle: int, tokens: list[int]) -> None:
        self.do("extend", handle=handle, tokens=tokens)

    @has_tables
    @rule(handle=HANDLES, leader=HANDLES, tokens=SEQUENCES)
    def extend_beside(self, handle: int, leader: int, tokens: list[int]) -> None:
        self.do("extend", handle=handle, tokens=tokens, leader=leader)

    @has_tables
    @rule(handle=HANDLES, tokens=SEQUENCES, fail_at=st.integers(1, 3))
    def extend_without_memory(self, handle: int, tokens: list[int], fail_at: int) -> None:
        self.do("extend", handle=handle, tokens=tokens, fail_at=fail_at)

    @rule()
    def step(self) -> None:
        self.do("step")

    @rule()
    def copy(self) -> None:
        self.do("copy")

    @rule()
    def confirm(self) -> None:
        self.do("confirm")

    @has_tables
    @rule(handle=HANDLES, tail=st.booleans())
    def publish(self, handle: int, tail: bool) -> None:  # noqa: FBT001
        self.do("publish", handle=handle, tail=tail)

    @has_tables
    @has_room
    @rule(handle=HANDLES)
    def fork(self, handle: int) -> None:
        self.do("fork", handle=handle)

    @has_tables
    @has_room
    @rule(handle=HANDLES, tokens=SEQUENCES)
    def fork_of_fork(self, handle: int, tokens: list[int]) -> None:
        """The grandchild writes after its parent has gone."""
        child = self.do("fork", handle=handle)
        grandchild = self.do("fork", handle=child)
        self.do("close", handle=child)
        self.do("extend", handle=grandchild, tokens=tokens)

    @has_tables
    @rule(handle=HANDLES, cut=CUTS)
    def truncate(self, handle: int, cut: int) -> None:
        """To any length, and past the end, which is refused."""
        self.do("truncate", handle=handle, seq_len=cut % (len(self.simulation.tables[handle].tokens) + 2))

    @has_tables
    @rule(handle=HANDLES)
    def close(self, handle: int) -> None:
        self.do("close", handle=handle)

    @rule()
    def use_closed(self) -> None:
        self.do("use_closed")

    def teardown(self) -> None:
        """After a good run everything ends: pages are free or cached, then all are free."""
        if hasattr(self, "simulation") and not self.failed:
            self.do("finish")


def drive(
    *,
    num_operations: int,
    num_pages: int,
    page_size: int,
    seed: int,
    num_host_pages: int = 0,
    alphabet: int = 2,
    policy: str = "lru",
    check_every: int = 1,
) -> Simulation:
    """Run a seeded random stream of operations and end it; raises at the first disagreement, naming a replay file."""
    simulation = Simulation(
        num_pages=num_pages,
        page_size=page_size,
        num_host_pages=num_host_pages,
        policy=policy,
        check_every=check_every,
    )
    try:
        Driver(simulation, seed=seed, alphabet=alphabet).run(num_operations)
    except Exception as error:
        error.add_note(f"replay_operations({str(_save(simulation))!r}) repeats this")
        raise
    return simulation


def replay_operations(path: str | Path) -> Simulation:
    """Repeat recorded operations with every check after each; raises where the recorded run did."""
    start, *operations = (json.loads(line) for line in Path(path).read_text().splitlines())
    settings = {name: value for name, value in start.items() if name != "op"}
    simulation = Simulation(**settings)
    for arguments in operations:
        name = arguments.pop("op")
        if name not in OPERATIONS:
            raise ValueError(f"{path} asks for the operation {name!r}; known are {', '.join(sorted(OPERATIONS))}")
        getattr(simulation, name)(**arguments)
    return simulation


def _save(simulation: Simulation) -> Path:
    with tempfile.NamedTemporaryFile(prefix="radixrt-", suffix=".jsonl", delete=False) as file:
        path = Path(file.name)
    simulation.save(path)
    return path
