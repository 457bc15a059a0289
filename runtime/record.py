"""A run on paper: what was submitted, planned, drawn and freed, one JSON object a line; and the rerun that compares.

Knows nothing of how an engine decides. Token ids are kept, text is not. A step that failed on the device, or was
interrupted there, leaves no line, and what follows it may differ in a rerun on a sound one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .config import EngineConfig
from .errors import InvalidRequest, RecordError
from .loading import load_model
from .model import Model
from .outputs import Handle
from .params import params_from_dict
from .pins import PinnedPrefix
from .plan import StepPlan
from .tier import Costs
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .engine import Engine

_VERSION = 2
Line = dict[str, Any]
Sink = Callable[[Line], None]


class Recorder:
    """Writes an engine's lines to a file, to a function, or nowhere."""

    def __init__(self, target: str | Path | Sink | None) -> None:
        self._file = _open(Path(target)) if isinstance(target, (str, Path)) else None
        self._sink: Sink | None = target if callable(target) else None

    def start(self, model: Model, config: EngineConfig) -> None:
        names = [field.name for field in fields(config) if field.name not in ("record", "kv_memory", "host_memory")]
        settings = {name: getattr(config, name) for name in names}
        self.write("engine", version=_VERSION, model=model.spec, settings=settings)

    def write(self, op: str, **fields: Any) -> None:
        """One line, on disk when this returns: a crash keeps all that led to it. RecordError where it cannot be."""
        try:
            if self._file is not None:
                self._file.write(json.dumps({"op": op, **fields}) + "\n")
                self._file.flush()
            if self._sink is not None:
                self._sink({"op": op, **fields})
        except Exception as error:  # of a disk that is full, or whatever the function raises
            raise RecordError(f"record: a line for {op!r} could not be written: {error!r}") from error

    def step(self, plan: StepPlan, drawn: list[int], freed: list[int], costs: Costs | None) -> None:
        """What was planned (`[number, choice, start, own_start, stop]` each), drawn, and freed since the last step.

        With a host tier that follows measured costs, what these were: a rerun decides by them.
        """
        if self._file is None and self._sink is None:
            return
        entries = [[*e.sequence.key, e.start, e.own_start, e.stop] for e in plan.entries]
        measured = {} if costs is None else {"costs": asdict(costs)}
        self.write("step", entries=entries, drawn=drawn, freed=list(freed), **measured)

    def close(self) -> None:
        """End the file; what is written then goes nowhere but to the function. Twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How far a rerun agreed: lines compared, and the first difference where there was one."""

    num_lines: int
    num_steps: int
    difference: str | None


def replay(path: str | Path, model: Model | None = None) -> Replay:
    """Run a record again with `check()` after each line; stops at the first difference.

    `model` stands in for the one that the record names, with bytes as its text. InvalidRequest where the file is no
    record.
    """
    from .engine import Engine  # the engine writes records, so it imports this module
    from .testing import ByteTokenizer  # tests only: an engine does not load it

    lines = _lines(Path(path))
    head = next(lines, {})
    if head.get("op") != "engine" or head.get("version") != _VERSION or not isinstance(head.get("settings"), dict):
        raise InvalidRequest(f"record: {path} does not start with an engine line of version {_VERSION}")
    seen: list[Line] = []
    settings = {**head["settings"], "record": lambda line: seen.append(json.loads(json.dumps(line)))}
    num_lines = num_steps = 0
    model, tokenizer = _model_of(head.get("model")) if model is None else (model, ByteTokenizer())
    with Engine(model, tokenizer=tokenizer, **settings) as engine:
        seen.clear()
        for number, line in enumerate(lines, 2):
            num_lines, num_steps = num_lines + 1, num_steps + (line["op"] == "step")
            try:
                _apply(engine, line, seen)
                engine.check()
            except Exception as error:
                return Replay(num_lines=num_lines, num_steps=num_steps, difference=f"line {number}: {error!r}")
            if seen[:1] != [line]:
                difference = (
                    f"line {number}: recorded {json.dumps(line)}, now {json.dumps(seen[0]) if seen else 'nothing'}"
                )
                return Replay(num_lines=num_lines, num_steps=num_steps, difference=difference)
            del seen[0]
    return Replay(num_lines=num_lines, num_steps=num_steps, difference=None)


def _apply(engine: Engine, line: Line, seen: list[Line]) -> None:
    """Do again what a line says was done, unless an earlier line has brought it about."""
    if seen:
        return
    match line["op"]:
        case "submit":
            origin = {name: line[name] for name in ("namespace", "priority", "cache")}
            engine.submit(line["tokens"], params_from_dict(line["params"]), **origin)
        case "fork":
            params = params_from_dict(line["params"]) if line["params"] is not None else None
            where = {name: line[name] for name in ("text", "choice", "at")}
            engine.fork(Handle(line["parent"]), line["n"], params, **where)
        case "abort":
            engine.abort(Handle(line["number"]))
        case "release":
            engine.release(Handle(line["number"]))
        case "truncate":
            engine.truncate(Handle(line["number"]), line["num_tokens"], choice=line["choice"])
        case "adopt":
            choices = {name: line[name] for name in ("choice", "branch_choice")}
            engine.adopt(Handle(line["number"]), Handle(line["branch"]), **choices)
        case "pin":
            engine.pin(line["tokens"], line["namespace"], ttl=line["ttl"])
        case "unpin":
            engine.unpin(PinnedPrefix(line["number"], 0))
        case "reset":
            engine.reset_cache()
        case "lost":
            engine._loop.begin_anew(num_submitted=line["num_submitted"], num_pinned=line["num_pinned"])
        case "step":
            engine.tier.recorded = Costs(**line["costs"]) if "costs" in line else None
            engine.step()


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"record: {path} cannot be written: {error}") from error


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                yield _line(text, f"line {number} of {path}")
    except OSError as error:
        raise InvalidRequest(f"record: {path} cannot be read: {error}") from error


def _line(text: str, where: str) -> Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"record: {where} is cut off or no JSON: {error}") from error
    if not isinstance(line, dict) or "op" not in line:
        raise InvalidRequest(f"record: {where} is no record line")
    return line


def _model_of(spec: Any) -> tuple[Model, Tokenizer]:
    """The model that a record names, built anew, and its tokenizer."""
    match spec:
        case {"kind": "hash", "vocab": int(vocab), "context": int(context), "eos": list(eos)}:
            from .testing import ByteTokenizer, HashModel

            return HashModel(vocab=vocab, context=context, eos=frozenset(eos)), ByteTokenizer()
        case {"kind": "transformers", "name": str(name), "dtype": str(dtype), "device": str(device), "exact": exact}:
            return load_model(name, dtype=dtype, device=device, exact=None if exact else False)
    raise InvalidRequest(f"record: names no model that can be built again: {spec!r}")
