"""The public face: `import radixrt as rx`, then `rx.Engine`. Names load when they are first used.

Knows where the names live and nothing else. It must stay lazy: importing any submodule runs this file first, and
`radixrt.radix` imports without torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixrt.frontend.language import (
        Answer,
        Branches,
        Call,
        Choice,
        Cost,
        Failed,
        GenerationFailed,
        Mark,
        Ok,
        OpenTelemetry,
        Outline,
        Program,
        ServerError,
        Session,
        Slot,
        State,
        StateMisuse,
        Tool,
        Trace,
        Yardstick,
        describe,
        events,
        load_trace,
        program,
        session,
        tool,
    )
    from radixrt.frontend.planner import CapacityPlan, plan
    from radixrt.frontend.url import UrlBackend, connect
    from radixrt.radix import RadixrtError
    from radixrt.runtime import (
        BeamParams,
        ChoiceEvent,
        Engine,
        FinishEvent,
        Grammar,
        Handle,
        InvalidRequest,
        KVGeometry,
        ModelError,
        Output,
        SamplingParams,
        Score,
        ScoreParams,
        TokenEvent,
    )

    __version__: str

__all__ = [
    "Answer",
    "BeamParams",
    "Branches",
    "Call",
    "CapacityPlan",
    "Choice",
    "ChoiceEvent",
    "Cost",
    "Engine",
    "Failed",
    "FinishEvent",
    "GenerationFailed",
    "Grammar",
    "Handle",
    "InvalidRequest",
    "KVGeometry",
    "Mark",
    "ModelError",
    "Ok",
    "OpenTelemetry",
    "Outline",
    "Output",
    "Program",
    "RadixrtError",
    "SamplingParams",
    "Score",
    "ScoreParams",
    "ServerError",
    "Session",
    "Slot",
    "State",
    "StateMisuse",
    "TokenEvent",
    "Tool",
    "Trace",
    "UrlBackend",
    "Yardstick",
    "__version__",
    "connect",
    "describe",
    "events",
    "load_trace",
    "plan",
    "program",
    "session",
    "tool",
]

# Where names live that are neither the runtime's nor the language's; the cache's are known without loading torch.
_HOMES = {
    "CapacityPlan": "radixrt.frontend.planner",
    "RadixrtError": "radixrt.radix",
    "UrlBackend": "radixrt.frontend.url",
    "connect": "radixrt.frontend.url",
    "plan": "radixrt.frontend.planner",
}


if not TYPE_CHECKING:  # a type checker that sees a module's __getattr__ accepts every name

    def __getattr__(name: str) -> object:
        """The public name, loaded and kept. Raises AttributeError for any other."""
        if name not in __all__:
            raise AttributeError(f"module 'radixrt' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = _installed_version() if name == "__version__" else getattr(import_module(_home(name)), name)
        globals()[name] = value
        return value


def _home(name: str) -> str:
    """The module that has a public name."""
    if name in _HOMES:
        return _HOMES[name]
    is_runtime = name in import_module("radixrt.runtime").__all__
    return "radixrt.runtime" if is_runtime else "radixrt.frontend.language"


def __dir__() -> list[str]:
    return sorted(__all__)


def _installed_version() -> str:
    try:
        return version("radixrt")
    except PackageNotFoundError:  # the source tree on sys.path, not installed
        return "0+uninstalled"
