"""Where an engine's step spends its time: methods wrapped from outside, each charged for what no inner one is.

Knows the runtime's methods by name and changes none of its code; everything is unwrapped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import radixrt as rx
from radixrt.kernels.cpu.native import NativeAttention
from radixrt.kernels.cpu.torch_attention import TorchAttention
from radixrt.runtime.batch import Batch
from radixrt.runtime.detokenizer import Detokenizer
from radixrt.runtime.plan import StepPlan

FORWARD, PLAN, REST = "forward", "attention plan", "the rest"
_RADIX = ("open", "match", "peek", "extend", "publish", "copies_done", "truncate", "close")


class Phases:
    """Seconds per phase. A call inside another stops the outer one's clock."""

    def __init__(self, names: Iterable[str], clock: Callable[[], float]) -> None:
        self.names = tuple(names)
        self._clock = clock
        self._seconds = dict.fromkeys(self.names, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._running.append(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._charge()
                self._running.pop()

        return run

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(self.names, 0.0)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now


@contextmanager
def watch(engine: rx.Engine, clock: Callable[[], float], *, only: tuple[str, ...] = ()) -> Iterator[Phases]:
    """The phases of the engine's steps inside the block, in the order in which a step comes to them.

    With `only`, these and the rest: to look at every call of a step of 32 takes half a millisecond of it.
    """
    places: dict[str, list[tuple[Any, str]]] = {
        "scheduling": [(engine._loop.scheduler, "plan")],
        "radix cache": [(engine._loop.cache, name) for name in _RADIX],
        "batch": [(StepPlan, "batch")],
        PLAN: [(Batch, "plan"), (NativeAttention, "prepare"), (TorchAttention, "prepare")],
        FORWARD: [(type(engine.model), "forward")],
        "sampling": [(engine._loop, "_draw")],
        "appending, events": [(engine._loop, "_append")],
        "detokenising": [(Detokenizer, "add")],
        REST: [(engine, "step")],
    }
    places = {phase: methods for phase, methods in places.items() if not only or phase in (*only, REST)}
    phases = Phases(places, clock)
    with ExitStack() as stack:
        for phase, methods in places.items():
            for owner, name in methods:
                stack.enter_context(patch.object(owner, name, phases.timed(phase, getattr(owner, name))))
        yield phases
