"""How every test run behaves: Hypothesis profiles, which tests are deep, shards of the suite, and the environment.

Knows nothing of what the tests test.
"""

from __future__ import annotations

import os
import sys

# libgomp reads this once, when torch loads it. The Makefile sets it for every process; this serves a bare `pytest`.
if "OMP_WAIT_POLICY" not in os.environ and "torch" in sys.modules:
    raise RuntimeError("torch was loaded before OMP_WAIT_POLICY was set: run with OMP_WAIT_POLICY=PASSIVE")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for a network: a miss fails at once

import pytest
from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("RADIXRT_PROFILE", "ci")

# A slow machine is no fault of the data: no deadline, no complaint about slow generation.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,  # the same examples for everyone; `deep` is what looks further
    max_examples=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep",
    deadline=None,
    max_examples=2_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(PROFILE)


@pytest.fixture(scope="session")
def profile() -> str:
    """`ci` or `deep`: tests that count by themselves take their count from it."""
    return PROFILE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this profile and this shard: `SHARD=i/n` runs every n-th test, from the i-th on."""
    shard, num_shards = _parse_shard(os.environ.get("SHARD", "1/1"))
    runnable = [item for item in items if PROFILE == "deep" or item.get_closest_marker("deep") is None]
    kept = runnable[shard - 1 :: num_shards]
    left_out = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = kept


def _parse_shard(text: str) -> tuple[int, int]:
    """`i/n` as two numbers with 1 <= i <= n."""
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise pytest.UsageError(f"SHARD is {text!r}; it must be i/n with 1 <= i <= n, such as 2/4")
    return int(first), int(second)
