"""What the source of a program says of its text: read, and never run. Knows no tokens.

Reading goes statement by statement, with what is known of the arguments, to the first thing that could run code of
the author's or depends on what is not known. Values are only ever of Python's own types, looked at without a call.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import dedent
from types import MemberDescriptorType
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
CALLS = ("gen", "choose", "fork", "scratch")
_PLAIN = (str, int, float, bool, type(None))
_SERIES = (list, tuple, range)
_CONVERSIONS: dict[int, Callable[[object], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}
MAX_STATEMENTS = 100_000  # read of one program, loops unrolled


@dataclass(frozen=True, slots=True)
class Opened:
    """A message of this role begins."""

    role: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The message that was open has ended."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What every run begins with: texts, and where messages open and close.

    `is_whole`: a generation comes next, so this is all of its prompt. Else `end` is what stopped the reading.
    """

    parts: tuple[str | Opened | Closed, ...]
    end: str
    is_whole: bool

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One of the language's methods where the source calls it. `count`: branches of a fork, most tokens of a `gen`.

    None: not known. `repeats`: in a loop, or in a function that may be called more than once.
    """

    line: int
    method: str
    count: int | None
    repeats: bool


class _Stopped(Exception):
    def __init__(self, node: ast.AST) -> None:
        self.node = node


class Source:
    """The source of one function, parsed once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._tree = _parsed(function)
        self._first_line = function.__code__.co_firstlineno if self._tree is not None else 1
        names = list(inspect.signature(function).parameters)
        self._state = names[0] if names else ""

    def prefix(self, known: Mapping[str, Any]) -> Prefix:
        """How every run begins whose arguments have these values, where they are known."""
        if self._tree is None:
            return Prefix((), "a source that cannot be read", is_whole=False)
        reader = _Reader(self._state, self._environment(known))
        try:
            reader.read(self._tree.body)
        except _Stopped as stopped:
            line = self._first_line + getattr(stopped.node, "lineno", 1) - 1
            is_whole = _generates(stopped.node, self._state)
            return Prefix(tuple(reader.parts), f"line {line}: {_shown(stopped.node)}", is_whole)
        return Prefix(tuple(reader.parts), "its end", is_whole=False)

    def calls(self, known: Mapping[str, Any]) -> tuple[Call, ...]:
        """The generations and branches that the source has, in its order; how often they run is another matter."""
        if self._tree is None:
            return ()
        stored = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and _is_stored(node)}
        environment = {name: value for name, value in self._environment(known).items() if name not in stored}
        found = _calls(self._tree.body, repeats=False)
        return tuple(self._call(node, environment, repeats) for node, repeats in found)

    def _call(self, node: ast.Call, environment: dict[str, Any], repeats: bool) -> Call:  # noqa: FBT001
        assert isinstance(node.func, ast.Attribute), "a method"
        method = node.func.attr
        given: dict[str | None, ast.expr] = {keyword.arg: keyword.value for keyword in node.keywords}
        argument = given.get("max_tokens") if method == "gen" else node.args[0] if node.args else None
        count: int | None = 64 if method == "gen" and argument is None and None not in given else None
        if argument is not None:
            try:
                value = _Reader(self._state, environment).value(argument)
                count = value if type(value) is int else len(value) if type(value) in _SERIES else None
            except _Stopped:
                count = None
        return Call(line=self._first_line + node.lineno - 1, method=method, count=count, repeats=repeats)

    def _environment(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Values by name, the constants around the function included; parameters without a value are unknown."""
        code, environment = self._function.__code__, dict[str, Any]()
        around = dict(self._function.__globals__)
        for name, cell in zip(code.co_freevars, self._function.__closure__ or (), strict=True):
            around[name] = _content(cell)
        for name in {*code.co_names, *code.co_freevars}.difference(code.co_varnames, code.co_cellvars):
            if type(around.get(name, _stop)) in (*_PLAIN, *_SERIES):
                environment[name] = around[name]
        if "range" not in around:
            environment["range"] = range
        return environment | dict(known)


class _Reader:
    """Reads statements. Raises _Stopped at what it cannot know."""

    def __init__(self, state: str, environment: dict[str, Any]) -> None:
        self.parts: list[str | Opened | Closed] = []
        self._state = state
        self._values = environment
        self._num_read = 0

    def read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._num_read += 1
            if self._num_read > MAX_STATEMENTS:
                raise _Stopped(statement)
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if name == self._state:
                for text in self._texts(value):
                    self.parts.append(text)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != self._state:
                self._assign(name, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name != self._state:
                self._assign(name, value)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not _runs_code(node):
                self._values.pop(name, None)
            case ast.With(items=[ast.withitem(context_expr=call, optional_vars=None)], body=body):
                self._message(node, call, body)
            case ast.For(target=target, iter=series, body=body, orelse=orelse):
                for item in self._series(series):
                    self._unpack(target, item)
                    self.read(body)
                self.read(orelse)
            case ast.If(test=test, body=body, orelse=orelse):
                known = self.value(test)
                if type(known) not in (*_PLAIN, *_SERIES, dict):
                    raise _Stopped(test)
                self.read(body if known else orelse)
            case _:
                raise _Stopped(node)

    def _assign(self, name: str, value: ast.expr) -> None:
        try:
            self._values[name] = self.value(value)
        except _Stopped:
            if any(isinstance(part, ast.Call | ast.Await | ast.NamedExpr | ast.Yield) for part in ast.walk(value)):
                raise _Stopped(value) from None  # the call might do anything, to the state too
            self._values.pop(name, None)

    def _message(self, node: ast.AST, call: ast.expr, body: list[ast.stmt]) -> None:
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=role), args=[], keywords=[]):
                if name == self._state and role in ROLES:
                    self.parts.append(Opened(role))
                    self.read(body)
                    self.parts.append(Closed())
                    return
        raise _Stopped(call)

    def _series(self, node: ast.expr) -> Any:
        value = self.value(node)
        if type(value) not in _SERIES:
            raise _Stopped(node)
        return value

    def _unpack(self, target: ast.expr, item: Any) -> None:
        match target:
            case ast.Name(id=name) if name != self._state:
                self._values[name] = item
            case ast.Tuple(elts=targets) if type(item) in _SERIES and len(item) == len(targets):
                for one, value in zip(targets, item, strict=True):
                    self._unpack(one, value)
            case _:
                raise _Stopped(target)

    def _texts(self, node: ast.expr) -> Iterator[str]:
        """The pieces of a text, as far as they are known."""
        match node:
            case ast.JoinedStr(values=values):
                for value in values:
                    yield from self._texts(value)
            case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
                known = self.value(value)
                if type(known) not in _PLAIN:
                    raise _Stopped(value)
                shown = _CONVERSIONS[conversion](known) if conversion in _CONVERSIONS else known
                yield self._formatted(node, shown, "".join(self._texts(spec)) if spec is not None else "")
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from self._texts(left)
                yield from self._texts(right)
            case _:
                text = self.value(node)
                if type(text) is not str:
                    raise _Stopped(node)
                yield text

    def _formatted(self, node: ast.expr, value: Any, spec: str) -> str:
        try:
            return format(value, spec)
        except ValueError:
            raise _Stopped(node) from None

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, which may be any object that was given."""
        match node:
            case ast.Constant(value=value) if type(value) in _PLAIN:
                return value
            case ast.Name(id=name) if name in self._values:
                return self._values[name]
            case ast.JoinedStr():
                return "".join(self._texts(node))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return tuple(map(self.value, elements))
            case ast.Attribute(value=base, attr=name):
                return _attribute(node, self.value(base), name)
            case ast.Subscript(value=base, slice=index):
                return _item(node, self.value(base), self.value(index))
            case ast.BinOp(left=left, op=op, right=right):
                return _sum(node, self.value(left), op, self.value(right))
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if self._values.get("range") is range:
                bounds = [self.value(argument) for argument in args]
                if bounds and len(bounds) <= 3 and all(type(bound) is int for bound in bounds) and bounds[2:] != [0]:
                    return range(*bounds)
        raise _Stopped(node)


def _attribute(node: ast.expr, base: Any, name: str) -> Any:
    """A field of a dataclass or the like, where reading it runs nothing."""
    plain: Any = object.__getattribute__
    if type(base).__getattribute__ is not plain:
        raise _Stopped(node)
    found = inspect.getattr_static(base, name, _stop)
    if isinstance(found, MemberDescriptorType):  # of a class with slots
        try:
            return found.__get__(base)
        except AttributeError:
            raise _Stopped(node) from None
    if name not in getattr(base, "__dict__", {}) or found is not base.__dict__[name]:
        raise _Stopped(node)
    return found


def _item(node: ast.expr, base: Any, index: Any) -> Any:
    if type(base) not in (list, tuple, dict, str) or type(index) not in _PLAIN:
        raise _Stopped(node)
    try:
        return base[index]
    except (LookupError, TypeError):
        raise _Stopped(node) from None


def _sum(node: ast.expr, left: Any, op: ast.operator, right: Any) -> Any:
    if type(left) is type(right) is int and isinstance(op, ast.Add | ast.Sub):
        return left + right if isinstance(op, ast.Add) else left - right
    if type(left) is type(right) is str and isinstance(op, ast.Add):
        return left + right
    raise _Stopped(node)


def _parsed(function: Callable[..., Any]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    if hasattr(function, "__wrapped__") or not inspect.isfunction(function):
        return None  # what is around the function does more than its source says
    try:
        [tree] = ast.parse(dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _generates(node: ast.AST, state: str) -> bool:
    """What stopped the reading is a generation of the state, perhaps with something done to its value."""
    inner = getattr(node, "value", node)
    while not isinstance(inner, ast.Name) and inner is not None:
        match inner:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="gen" | "choose")) if name == state:
                return True
        inner = getattr(inner, "func", None) or getattr(inner, "value", None)
    return False


def _calls(body: list[ast.stmt] | list[ast.AST], *, repeats: bool) -> Iterator[tuple[ast.Call, bool]]:
    loops = (ast.For, ast.AsyncFor, ast.While, ast.comprehension, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for node in body:
        yield from _calls(list(ast.iter_child_nodes(node)), repeats=repeats or isinstance(node, loops))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            yield node, repeats


def _runs_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Defining the function evaluates something."""
    return bool(node.decorator_list or node.args.defaults or any(node.args.kw_defaults))


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _stop


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


_stop = object()
