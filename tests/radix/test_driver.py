"""Long seeded runs of random operations: 10^5 in `make test`, 10^6 with every check in `make deep`.

Does not look inside the cache.
"""

import pytest

from radixrt.radix.testing import drive

# num_pages, num_host_pages, page_size, policy, alphabet, operations in `make test`, full checks every so many there
RUNS = [
    (4, 0, 1, "lru2", 2, 6_000, 1),
    (6, 3, 2, "lru", 2, 7_000, 1),
    (9, 5, 4, "duel", 2, 7_000, 1),
    (12, 0, 16, "lru2", 3, 15_000, 50),
    (24, 8, 1, "duel", 4, 15_000, 50),
    (32, 0, 4, "lru", 2, 30_000, 50),
    (64, 90, 2, "lru2", 3, 20_000, 50),
    (64, 0, 2, "duel", 3, 10_000, 50),
]


@pytest.mark.parametrize(
    ("num_pages", "num_host_pages", "page_size", "policy", "alphabet", "num_operations", "check_every"), RUNS
)
def test_a_long_run_agrees_with_the_reference(
    num_pages: int,
    num_host_pages: int,
    page_size: int,
    policy: str,
    alphabet: int,
    num_operations: int,
    check_every: int,
    profile: str,
) -> None:
    drive(
        num_operations=10 * num_operations if profile == "deep" else num_operations,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        page_size=page_size,
        alphabet=alphabet,
        policy=policy,
        check_every=1 if profile == "deep" else check_every,
        seed=num_pages,
    )
