"""The program language, as `import radixrt as rx` offers it: everything named here. Knows nothing beyond the names."""

from .failures import GenerationFailed, StateMisuse
from .program import Program, program
from .run import Cost
from .scope import Branches, Failed, Ok
from .session import Session, session
from .slot import Slot
from .state import Mark, State

__all__ = [
    "Branches",
    "Cost",
    "Failed",
    "GenerationFailed",
    "Mark",
    "Ok",
    "Program",
    "Session",
    "Slot",
    "State",
    "StateMisuse",
    "program",
    "session",
]
