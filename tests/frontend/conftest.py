"""Engines for tests of programs: poisoned free pages, and after every test no page held by anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest

from radixrt.runtime import Engine, ModelError, Tokenizer, load_model
from radixrt.runtime.testing import ByteTokenizer, HashModel

MakeEngine = Callable[..., Engine]


def audit(engine: Engine) -> None:
    """No program runs: nothing waits, runs or holds a page, and the engine is sound."""
    engine.step()  # what was aborted says so
    engine.check()
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.cache.num_tables == stats.cache.num_pins == stats.cache.num_copies == stats.cache.num_held == 0


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines on the hash model; each is audited when the test ends."""
    engines: list[Engine] = []

    def make(model: Any = None, **given: Any) -> Engine:
        settings: dict[str, Any] = {"num_pages": 256, "poison": True, "tokenizer": ByteTokenizer()} | given
        engines.append(Engine(model if model is not None else HashModel(vocab=128), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        audit(engine)
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@lru_cache
def default_tokenizer() -> Tokenizer:
    try:
        return load_model("smollm2-135m")[1]
    except ModelError:
        pytest.skip("the default model is not installed")
