"""The cache against its reference: the state machine of the test kit, and what the kit itself promises.

Does not look inside the cache.
"""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import run_state_machine_as_test

from radixrt.radix.testing import (
    Disagreement,
    RadixCacheMachine,
    drive,
    page_sizes,
    prefix_families,
    replay_operations,
    token_sequences,
)

# Shrinking is quick here and a blob reproduces the failure, so both profiles keep them; only `deep` looks further.
PROFILES = {
    "ci": settings(max_examples=300, stateful_step_count=60, derandomize=True),
    "deep": settings(max_examples=20_000, stateful_step_count=100, derandomize=False),
}
PROFILE = settings(
    PROFILES[os.environ.get("RADIXRT_PROFILE", "ci")],
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_every_operation_agrees_with_the_reference() -> None:
    run_state_machine_as_test(RadixCacheMachine, settings=PROFILE)


@given(st.data())
def test_sequences_keep_to_their_alphabet(data: st.DataObject) -> None:
    page_size, alphabet = data.draw(page_sizes()), data.draw(st.integers(2, 4))
    tokens = data.draw(token_sequences(page_size=page_size, alphabet=alphabet))
    assert set(tokens) <= set(range(alphabet))
    assert len(tokens) <= 5 * (page_size + 1)


@given(st.data())
def test_a_family_shares_prefixes(data: st.DataObject) -> None:
    family = data.draw(prefix_families(page_size=4))
    assert 1 <= len(family) <= 8


def test_a_recorded_run_repeats(tmp_path: Path) -> None:
    first = drive(num_operations=200, num_pages=12, page_size=2, seed=3)
    first.save(tmp_path / "run.jsonl")
    second = replay_operations(tmp_path / "run.jsonl")
    assert second.operations == first.operations
    assert second.snapshot() == first.snapshot()


def test_a_recording_names_only_operations(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = ({"op": "start", "num_pages": 4, "page_size": 1, "policy": "lru"}, {"op": "save", "path": "/dev/null"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="'save'"):
        replay_operations(path)


def test_a_failing_machine_prints_a_file_that_repeats_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("radixrt.radix.cache.RadixCache.peek", lambda *_, **__: 1)
    with pytest.raises(Disagreement, match="peek") as caught:
        run_state_machine_as_test(RadixCacheMachine, settings=settings(PROFILE, max_examples=50, database=None))
    (path,) = tmp_path.glob("*.jsonl")
    assert any(str(path) in line for line in getattr(caught.value, "__notes__", ()))
    with pytest.raises(Disagreement, match="peek"):
        replay_operations(path)
