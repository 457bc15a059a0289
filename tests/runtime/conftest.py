"""Engines for tests: poisoned free pages, and the whole-state audit after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixrt.runtime import Engine, FinishEvent, Handle, Output
from radixrt.runtime.testing import ByteTokenizer, HashModel

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines on the hash model, or on `model`; each is audited and found empty when the test ends."""
    engines: list[Engine] = []

    def make(model: Any = None, **given: Any) -> Engine:
        settings: dict[str, Any] = {"num_pages": 256, "poison": True, "tokenizer": ByteTokenizer()} | given
        engines.append(Engine(model if model is not None else HashModel(), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        audit(engine)


def audit(engine: Engine) -> None:
    """Abort what lives; then every page is free or cached, none is held, and a reset frees all."""
    engine.check()
    engine.close()
    engine.check()
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.cache.num_tables == stats.cache.num_pins == stats.cache.num_copies == stats.cache.num_held == 0
    assert stats.cache.num_free + stats.cache.num_cached == stats.cache.num_pages


def finish(engine: Engine, *, num_steps: int = 10_000) -> dict[Handle, Output]:
    """Step, audited, until nothing lives."""
    outputs: dict[Handle, Output] = {}
    for _ in range(num_steps):
        outputs |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
        engine.check()
        if not engine.stats().num_running and not engine.stats().num_waiting:
            return outputs
    raise AssertionError("the engine stalls")
