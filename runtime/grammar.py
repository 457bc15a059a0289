"""A `Grammar`: what text an output may be, as a JSON schema, a regex, a Lark grammar or a choice. Checked when made.

Knows nothing of tokens or of how a grammar is enforced; llguidance says what it can enforce, and this module what of
that holds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal, get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .checks import refuse, text
from .errors import InvalidRequest

Kind = Literal["json_schema", "regex", "lark", "choice"]

MAX_SOURCE = 128 * 1024  # characters
MAX_DEPTH = 400  # levels of a schema, `$ref` followed: llguidance's recursion takes 5 KB of stack for each
MAX_RULES = 256  # of a Lark grammar, which may call each other, and MAX_GROUPS within them
MAX_GROUPS = 1000
MAX_REPEAT = 5000  # product of nested counts in a regex
MAX_MULTIPLE = 10_000  # least common multiple of all `multipleOf`: the states of an automaton, 5 us each

_ANNOTATIONS = {"$comment", "$id", "$schema", "default", "deprecated", "description", "discriminator", "examples"} | {
    "readOnly",
    "title",
    "writeOnly",
}
_VALUES = {"$anchor", "$ref", "const", "enum", "format", "maxItems", "maxLength", "maxProperties", "minItems"} | {
    "minLength",
    "minProperties",
    "pattern",
    "required",
    "type",
}
_NUMBERS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}
_SCHEMAS = {"additionalProperties", "items"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_NAMED = {"$defs", "definitions", "properties"}
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}

# As json.dumps writes, and models know. Free white space invites a small model to go on with it for ever; escapes by
# number would let an additional property spell the name of another.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}

# Classes that differ between Python's `re` and Rust's: what both mean, and for sets that are negated what either does.
# Python 3.11 knows the characters of Unicode 14.
_DIGIT, _WORD = r"\p{Nd}&&\p{age:14.0}", r"[\p{L}\p{Nd}_]&&\p{age:14.0}"
_ANY_WORD, _ANY_SPACE = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}", r"\p{White_Space}\x1c-\x1f"
_BOTH = {r"\d": f"[{_DIGIT}]", r"\w": f"[{_WORD}]", r"\W": f"[^{_ANY_WORD}]", r"\S": f"[^{_ANY_SPACE}]"}
_EITHER = {r"\D": f"[^{_DIGIT}]", r"\w": f"[{_ANY_WORD}]", r"\W": f"[^{_WORD}]", r"\s": f"[{_ANY_SPACE}]"}
_FLAGS = re.compile(r"\(\?[is]+\)")
_PIECE = re.compile(
    r"""(?P<escape> \\[xuU]\{\w*\} | \\[pP]\{[^}]*\} | \\.)
      | (?P<set> \[\^?\]?)
      | (?P<open> \((?: \?P<\w+> | \?[is]*(?:-[is]+)?: | (?!\?)))
      | (?P<close> \))
      | (?P<count> (?:[*+?] | \{\d+(?:,\d*)?\}) [?+]?)
      | (?P<other> [^(])""",
    re.DOTALL | re.VERBOSE,
)
_IN_SET = re.compile(r"\\[xuU]\{\w*\}|\\[pP]\{[^}]*\}|\\.|--|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output may be. Frozen, hashable, picklable; made by one of the four class methods.

    InvalidRequest, in one line, for what llguidance cannot compile within `limits()`, and for what it would ignore:
    an output is never freer than the grammar says.
    """

    kind: Kind
    source: str  # the schema or the options as JSON, the regex, the Lark text

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON values as `json.dumps` writes them, in the order of the schema's properties.

        Every keyword is enforced, says nothing about a value (`title`), or is refused.
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"grammar: a JSON schema given that is no JSON: {_line(error)}") from None
        return cls("json_schema", source)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that `re.fullmatch` accepts: Python's syntax, without look-around and back-references.

        `\\p{...}` is known too. `.` and negated classes match no byte that is not UTF-8.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Texts of the rule `start`, in llguidance's dialect of Lark; a `%json` in it is checked as a schema."""
        return cls("lark", text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            refuse("grammar", options, "a sequence of at least one text to choose from")
        for option in options:
            if not isinstance(option, str) or not option:
                refuse("grammar", option, "texts to choose from, none of them empty")
        return cls("choice", json.dumps(list(options)))

    @classmethod
    def from_dict(cls, plain: Mapping[str, str]) -> Grammar:
        """The grammar of which `to_dict` made this."""
        if len(plain) != 1:
            refuse("grammar", plain, f"one of {', '.join(get_args(Kind))} and its source")
        ((kind, source),) = plain.items()
        return cls(kind, source)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            refuse("grammar", self.kind, " or ".join(get_args(Kind)))
        if not isinstance(self.source, str) or len(self.source) > MAX_SOURCE:
            refuse("grammar", self.source, f"a text of at most {MAX_SOURCE} characters")
        text("grammar", self.source)
        try:
            failed, messages = LLMatcher.validate_grammar_with_warnings(self.compilable(), None, limits=limits())
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"grammar: {self.kind} given that cannot be read: {_line(error)}") from None
        if failed or messages:  # a warning says what would not be enforced
            raise InvalidRequest(f"grammar: {self.kind} given that cannot be enforced: {_line(messages[0])}")

    def accepts(self, text: str) -> bool:
        """The text, as it stands, is one of the grammar's. Costs as much as generating it did, without a model."""
        matcher = LLMatcher(_byte_tokenizer(), self.compilable(), log_level=0, limits=limits())
        data = list(text.encode(errors="surrogatepass"))
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    def after(self, prefix: str) -> Grammar:
        """The same behind this text. InvalidRequest for a Lark grammar, whose rules cannot be told from ours."""
        match self.kind:
            case "json_schema":
                text = json.dumps(prefix, ensure_ascii=False)
                return Grammar("lark", f"start: {text} value\nvalue: %json {self.source}")
            case "regex":
                flags = _FLAGS.match(self.source)
                inside = f"(?{flags[0][2:-1]}:" if flags else "(?:"
                rest = self.source[flags.end() :] if flags else self.source
                return Grammar.regex(f"{re.escape(prefix)}{inside}{rest})")
            case "choice":
                return Grammar.choice([prefix + option for option in json.loads(self.source)])
            case "lark":
                raise InvalidRequest("prefix: given with a Lark grammar; allowed: write it into the grammar")

    def to_dict(self) -> dict[str, str]:
        """As JSON holds it; `from_dict` makes an equal one."""
        return {self.kind: self.source}

    def compilable(self) -> str:
        """The grammar as llguidance takes it. InvalidRequest where this module knows that it would not hold."""
        match self.kind:
            case "json_schema":
                schema = json.loads(self.source)
                _check_schema(schema)
                return LLMatcher.grammar_from_json_schema(_with_patterns(schema), overrides=_JSON)  # type: ignore[arg-type]
            case "regex":
                return LLMatcher.grammar_from_regex(translated(self.source))
            case "choice":  # as one regex: rules would be slow beyond some hundred
                options = "|".join("".join(map(_literal, option)) for option in json.loads(self.source))
                return LLMatcher.grammar_from_regex(options)
            case "lark":
                return LLMatcher.grammar_from_lark(_checked_lark(self.source))


@cache
def _byte_tokenizer() -> LLTokenizer:
    """A token for each byte."""
    return LLTokenizer("byte")


def limits() -> LLParserLimits:
    """What compiling a grammar (1 s) and one step of it (10 ms and 10 MB) may take at most, in llguidance's units.

    They are counts, so that a refusal does not depend on the machine.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=20_000,
        verbose_errors=False,
    )


def translated(pattern: str) -> str:
    """A regex of Python's for llguidance's engine, which then accepts nothing that Python would not.

    InvalidRequest for what would mean something else there, or whose nested counts multiply.
    """
    pieces: list[str] = []
    heaviest, last = [1], 1  # of the open groups; of the last atom
    at = 0
    if flags := _FLAGS.match(pattern):
        pieces.append(flags[0])
        at = flags.end()
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None:
            raise InvalidRequest(
                f"grammar: regex given with {pattern[at : at + 4]!r}; allowed: groups, (?: and (?P<name>"
            )
        piece, kind, at = found[0], found.lastgroup, found.end()
        if kind == "open":
            heaviest.append(1)
        elif kind == "close":
            last = heaviest.pop() if len(heaviest) > 1 else 1
        elif kind == "count":
            if len(piece) > 1 and piece.endswith("+"):
                raise InvalidRequest(f"grammar: regex given with the possessive {piece!r}; allowed: * + ? {{m,n}}")
            last *= max([1, *map(int, re.findall(r"\d{1,9}", piece))])
        else:
            last = 1
        heaviest[-1] = max(heaviest[-1], last) if kind != "open" else 1
        if last > MAX_REPEAT:
            raise InvalidRequest(f"grammar: regex given whose counts multiply to {last}; allowed: {MAX_REPEAT}")
        pieces.append(_BOTH.get(piece, piece))
        if kind == "set":
            inside, at = _set_rest(pattern, at, _EITHER if "^" in piece else _BOTH)
            pieces.append(inside)
    return "".join(pieces)


def _set_rest(pattern: str, at: int, classes: dict[str, str]) -> tuple[str, int]:
    """The rest of a set that was opened before `at`, where Rust reads sets in sets and Python does not; its end."""
    pieces: list[str] = []
    for found in _IN_SET.finditer(pattern, at):
        piece = found[0]
        if piece == "--":
            raise InvalidRequest("grammar: regex given with '--' in a set; allowed: a hyphen written \\-")
        pieces.append("\\" + piece if piece in "[&~" else classes.get(piece, piece))
        if piece == "]":
            return "".join(pieces), found.end()
    return "".join(pieces), len(pattern)


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _check_schema(schema: Any) -> None:
    """InvalidRequest where a keyword could not be relied on, or the schema is too deep."""
    depth, targets, multiple = _depth(schema), set[str](), Fraction(0)
    if re.search(r"\\u00[01]", json.dumps(schema)):
        raise InvalidRequest("grammar: json_schema given with a control character; allowed: \\b \\f \\n \\r \\t")
    for node in _subschemas(schema):
        for keyword, value in node.items():
            if keyword not in _ANNOTATIONS | _VALUES | _NUMBERS | _SCHEMAS | _LISTS | _NAMED:
                raise InvalidRequest(f"grammar: json_schema given with {keyword!r}, which cannot be enforced")
            if keyword in _NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
                refuse(f"grammar: {keyword}", value, "a number")
        if (name := node.get("format", "date")) not in sorted(_FORMATS):
            refuse("grammar: format", name, ", ".join(sorted(_FORMATS)))
        if node.get("minProperties") and node.get("additionalProperties") is not False:  # a name may come twice
            raise InvalidRequest(
                "grammar: json_schema given with minProperties; allowed: where additionalProperties is false"
            )
        if node.get("multipleOf"):
            multiple = _common_multiple(multiple, Fraction(str(node["multipleOf"])))
        if isinstance(node.get("$ref"), str):
            targets.add(node["$ref"])
    if depth + sum(_depth(_target(schema, ref)) for ref in targets) > MAX_DEPTH:
        raise InvalidRequest(f"grammar: json_schema given that is too deep; allowed: {MAX_DEPTH} levels over all $ref")


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    """The least common multiple of the two, `b` where `a` is 0; InvalidRequest where its automaton is too large."""
    denominator = math.lcm(a.denominator, b.denominator)
    numbers = [int(abs(x) * denominator) for x in (a, b) if x]
    multiple = math.lcm(*numbers)
    if multiple > MAX_MULTIPLE or denominator > 10**9:
        raise InvalidRequest(f"grammar: json_schema with a large or fine multipleOf; allowed: {MAX_MULTIPLE} states")
    return Fraction(multiple, denominator)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a schema that are not just True or False, itself included."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += _children(node)
        elif not isinstance(node, bool):
            refuse("grammar: a schema in the json_schema", node, "an object, true or false")


def _children(node: dict[str, Any]) -> list[Any]:
    children = [node[name] for name in _SCHEMAS & node.keys()]
    for name in _LISTS & node.keys():
        if not isinstance(node[name], list):
            refuse(f"grammar: {name}", node[name], "a list of schemas")
        children += node[name]
    for name in _NAMED & node.keys():
        if not isinstance(node[name], dict):
            refuse(f"grammar: {name}", node[name], "an object of schemas")
        children += node[name].values()
    return children


def _depth(schema: Any) -> int:
    """Levels of schemas; bounded by the nesting that JSON was read with."""
    deepest, level = 0, [schema]
    while level := [child for node in level if isinstance(node, dict) for child in _children(node)]:
        deepest += 1
    return deepest + 1


def _target(schema: Any, ref: str) -> Any:
    """What a local `$ref` points at; the whole schema where that is not clear."""
    node = schema
    for name in ref.removeprefix("#/").split("/") if ref.startswith("#/") else []:
        node = node.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else schema


def _with_patterns(schema: Any) -> Any:
    """The schema with its patterns as Rust reads them."""
    for node in _subschemas(schema):
        if isinstance(node.get("pattern"), str):
            node["pattern"] = translated(node["pattern"])
    return schema


def _checked_lark(text: str) -> str:
    """The text with its schemas as `json_schema` would have them.

    InvalidRequest where it could exhaust the stack, or a schema in it not be relied on.
    """
    if len(re.findall(r"^\s*[?!]?\w+[^:\n]*:", text, re.MULTILINE)) > MAX_RULES:
        raise InvalidRequest(f"grammar: lark given with too many rules; allowed: {MAX_RULES}")
    if text.count("(") + text.count("[") > MAX_GROUPS:
        raise InvalidRequest(f"grammar: lark given with too many groups; allowed: {MAX_GROUPS}")
    before, *parts = text.split("%json")
    for part in parts:
        try:
            schema, stop = json.JSONDecoder().raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            raise InvalidRequest("grammar: lark given with a %json that no JSON follows; allowed: a schema") from None
        if not isinstance(schema, dict):
            refuse("grammar: %json", schema, "a schema that is an object")
        _check_schema(schema)
        before += "%json " + json.dumps(_with_patterns(schema) | {"x-guidance": _JSON}) + part.lstrip()[stop:]
    return before


def _line(error: object) -> str:
    """What went wrong, in one line of no more than 200 characters."""
    return " ".join(str(error).split())[:200]
