"""Typed functions as tools: what the model may call, one grammar of all calls and the final answer, and what it chose.

Knows nothing of states or engines, and never runs a tool by itself.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from radixrt.runtime import InvalidRequest

from .failures import annotate
from .values import ExactSchema, Form, adapter_of, grammar_of, schema_of

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
AnyTool = Callable[..., object]  # a `Tool`, or a function that becomes one


@dataclass(frozen=True, slots=True, eq=False)
class Tool(Generic[P, R]):
    """A function that the model may call by name. Called in code, it is the function."""

    function: Callable[P, R]
    name: str
    doc: str
    parameters: TypeAdapter[Any]  # of an object with the arguments as its attributes

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its arguments, in the order of its parameters."""
        schema = schema_of(f"tool {self.name}", self.parameters)
        return {key: value for key, value in schema.items() if key != "title"}


def tool(function: Callable[P, R]) -> Tool[P, R]:
    """Make a tool of a function, plain or async, whose parameters are annotated.

    InvalidRequest for a parameter without a type, with one that cannot be enforced, or without a name of its own.
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise InvalidRequest(f"tool: {function!r} given; allowed: a function with a name")
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidRequest(f"tool {name}: its annotations name {error.name!r}, which is not known") from error
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise InvalidRequest(f"tool {name}: its parameters are not known; write a function that calls it") from error
    fields = [_field(name, parameter, hints) for parameter in signature.parameters.values()]
    parameters = adapter_of(make_dataclass(name, fields, kw_only=True))
    made = Tool(function, name, inspect.getdoc(function) or "", parameters)
    grammar_of(made.schema, f"tool {name}")  # refused here rather than in each program
    return made


def _field(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """A parameter as a dataclass has it."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise InvalidRequest(f"tool {name}: parameter {parameter} given; allowed: those that can be given by name")
    if parameter.name not in hints:
        raise InvalidRequest(f"tool {name}: parameter {parameter.name} has no type; annotate it")
    has_default = parameter.default is not parameter.empty
    default = field(default_factory=lambda: parameter.default) if has_default else field()
    return parameter.name, hints[parameter.name], default


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The model chose to call a tool."""

    tool: Tool[..., Any]
    text: str  # of the arguments, as the model wrote them: JSON
    arguments: Mapping[str, Any]  # as the parameters' types, with the defaults of those that were left out

    @property
    def name(self) -> str:
        return self.tool.name

    def run(self) -> Any:
        """What the tool returns; of an async one, something to await. What it raises stays what it is, with a note."""
        try:
            result = self.tool.function(**self.arguments)
        except Exception as error:
            self._note(error)
            raise
        return self._awaited(result) if inspect.isawaitable(result) else result

    async def _awaited(self, result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            self._note(error)
            raise

    def _note(self, error: Exception) -> None:
        annotate(error, f"in tool {self.name}, called with {self.text}")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The model chose to answer."""

    value: T


def describe(tools: Sequence[AnyTool]) -> str:
    """The tools as text for a prompt, one line of JSON each: name, description and parameters, in the order given."""
    lines = (
        {"name": one.name, "description": one.doc, "parameters": one.schema} for one in map(_tool_of, _checked(tools))
    )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def form_of_turn(tools: Sequence[AnyTool], answer: object) -> Form[Call | Answer[Any]]:
    """The form of one turn: `{"name": ..., "arguments": {...}}` for a call, or `{"answer": ...}`.

    InvalidRequest where there are no tools, two of one name, or types that cannot be enforced.
    """
    given = _checked(tools)
    try:
        hash(answer)
    except TypeError:
        return _turn.__wrapped__(given, answer)
    return _turn(given, answer)


@lru_cache(maxsize=64)
def _turn(tools: tuple[AnyTool, ...], answer: Any) -> Form[Call | Answer[Any]]:
    named = {one.name: one for one in map(_tool_of, tools)}
    if len(named) < len(tools):
        raise InvalidRequest(f"tools: two have one name among {[_tool_of(one).name for one in tools]}; rename one")
    answers = adapter_of(answer)
    adapters = {f"tool {one.name}": one.parameters for one in named.values()} | {"answer": answers}
    for what, adapter in adapters.items():
        schema_of(what, adapter)  # says which it is that has none
    mode: JsonSchemaMode = "validation"
    schemas, defs = TypeAdapter.json_schemas(
        [(what, mode, adapter) for what, adapter in adapters.items()], schema_generator=ExactSchema
    )
    turns = [_object(name={"const": name}, arguments=schemas[f"tool {name}", mode]) for name in named]
    turns.append(_object(answer=schemas["answer", mode]))
    name = f"turn with {', '.join(named)}"

    def read(text: str) -> Call | Answer[Any]:
        said = json.loads(text)
        if "answer" in said:
            return Answer(answers.validate_json(_value_text(text, "answer")))
        chosen, written = named[said["name"]], _value_text(text, "arguments")
        arguments = vars(chosen.parameters.validate_json(written))
        return Call(tool=chosen, text=written, arguments=arguments)

    return Form(name=name, grammar=grammar_of({"anyOf": turns, **defs}, name), read=read)


def _checked(tools: Sequence[AnyTool]) -> tuple[AnyTool, ...]:
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not tools:
        raise InvalidRequest(f"tools: {tools!r} given; allowed: a sequence of at least one function")
    for one in tools:
        if not isinstance(one, Hashable) or not callable(one):
            raise InvalidRequest(f"tools: {one!r} given; allowed: functions, or what rx.tool makes of them")
    return tuple(tools)


@lru_cache(maxsize=256)
def _tool_of(function: AnyTool) -> Tool[..., Any]:
    return function if isinstance(function, Tool) else tool(function)


def _object(**properties: Any) -> dict[str, Any]:
    """An object of exactly these properties, in this order."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _value_text(text: str, last: str) -> str:
    """The value of an object's last property, as it was written. No property before it holds its name in quotes."""
    return text.partition(f'"{last}":')[2].strip().removesuffix("}").rstrip()
