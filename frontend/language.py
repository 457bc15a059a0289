"""The program language, as `import radixrt as rx` offers it: everything named here. Knows nothing beyond the names."""

from . import events
from .choice import Choice
from .failures import GenerationFailed, ServerError, StateMisuse
from .otel import OpenTelemetry
from .outline import Outline
from .program import Program, program
from .run import Cost
from .scope import Branches, Failed, Ok
from .session import Session, session
from .slot import Slot
from .state import Mark, State
from .tools import Answer, Call, Tool, describe, tool
from .trace import Trace, load_trace
from .yardstick import Yardstick

__all__ = [
    "Answer",
    "Branches",
    "Call",
    "Choice",
    "Cost",
    "Failed",
    "GenerationFailed",
    "Mark",
    "Ok",
    "OpenTelemetry",
    "Outline",
    "Program",
    "ServerError",
    "Session",
    "Slot",
    "State",
    "StateMisuse",
    "Tool",
    "Trace",
    "Yardstick",
    "describe",
    "events",
    "load_trace",
    "program",
    "session",
    "tool",
]
