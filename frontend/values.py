"""The form of a Python type's values in text: the grammar that holds a generation to it, and how its text is read.

Knows nothing of states or engines. Numbers, flags and options are written as in running text, with a space in front
where the model puts one. Everything else is JSON, as pydantic describes it.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import reprlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaError

from radixrt.runtime import Grammar, InvalidRequest

from .failures import annotate

T_co = TypeVar("T_co", covariant=True)

_INT = r" ?-?(0|[1-9][0-9]*)"
_FLOAT = r" ?-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?"
_FLAGS = {"yes": True, "no": False, "true": True, "false": False}
_FLAGS |= {text.capitalize(): value for text, value in _FLAGS.items()}
_BOUNDS = ("ge", "gt", "le", "lt")

# Of times JSON schema's formats say more than Python knows: the 30th of February, 60 seconds.
_YEAR = "[12][0-9]{3}"
_LEAP_YEAR = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
_DURATION = "-?P(?:[0-9]{1,5}D|(?:[0-9]{1,5}D)?T[0-9]{1,2}H(?:[0-5]?[0-9]M)?(?:[0-5]?[0-9]S)?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Generic[T_co]):
    """How values of a type are written, and read again. A text that was cut is a value of `str` alone."""

    name: str  # of the type, for messages
    grammar: Grammar | None  # None: any text
    read: Callable[[str], T_co]  # ValueError for a text that is no value; what the type's own validators raise
    is_spaced: bool = False  # a space in front of the text is no part of the value

    @property
    def is_text(self) -> bool:
        return self.grammar is None


def form_of(kind: object) -> Form[Any]:
    """The form of a type, or of a grammar, whose values are its texts. Kept for types that can be hashed.

    InvalidRequest for what is no type, and where a part of the type could not be enforced. Validators of the type's
    own are not seen here: they run when a text is read.
    """
    if isinstance(kind, Grammar):
        return Form(name=f"text of the {kind.kind} grammar", grammar=kind, read=str)
    try:
        hash(kind)
    except TypeError:
        return _form(kind)
    return _kept_form(kind)


@lru_cache(maxsize=256)
def _kept_form(kind: Hashable) -> Form[Any]:
    return _form(kind)


def _form(kind: object) -> Form[Any]:
    if isinstance(kind, str):
        raise InvalidRequest(f"gen: {kind!r} given as a type; allowed: a type or a Grammar; a slot's name is `name=`")
    if kind is str:
        return Form(name="str", grammar=None, read=str)
    if kind is bool:
        return _options("bool", _FLAGS)
    if kind is int:
        return _number("int", _INT, int)
    if kind is float:
        return _number("float", _FLOAT, _finite)
    if get_origin(kind) is Literal:
        return _options(name_of(kind), _texts(name_of(kind), get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _options(kind.__name__, _texts(kind.__name__, tuple(kind)))
    return _structured(kind)


def _number(name: str, pattern: str, convert: Callable[[str], float]) -> Form[Any]:
    def read(text: str) -> float:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"no {name}")
        return convert(text)

    return Form(name=name, grammar=Grammar.regex(pattern), read=read, is_spaced=True)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("too large for a float")
    return number


def _texts(name: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """The values by their texts: an enumeration's are those of its members' values."""
    texts: dict[str, Any] = {}
    for value in values:
        plain = value.value if isinstance(value, Enum) else value
        if not isinstance(plain, str | int | float | None):
            raise InvalidRequest(f"{name}: {plain!r} is one of its values; allowed: texts, numbers, flags and None")
        if str(plain) in texts:
            raise InvalidRequest(f"{name}: two of its values are written {str(plain)!r}; allowed: texts that differ")
        texts[str(plain)] = value
    return texts


def _options(name: str, values: dict[str, Any]) -> Form[Any]:
    """One of some texts, with a space in front or not; a text that is an option as it stands is that option."""
    if not values:
        raise InvalidRequest(f"{name}: it has no values to choose from")
    written = {f" {text}": value for text, value in values.items()} | values

    def read(text: str) -> Any:
        if text not in written:
            raise ValueError(f"none of {', '.join(map(repr, values))}")
        return written[text]

    is_spaced = not any(text.startswith(" ") for text in values)
    return Form(name=name, grammar=Grammar.choice(list(written)), read=read, is_spaced=is_spaced)


def _structured(kind: object) -> Form[Any]:
    name, adapter = name_of(kind), adapter_of(kind)
    return Form(name=name, grammar=grammar_of(schema_of(name, adapter), name), read=adapter.validate_json)


# -- types as JSON ------------------------------------------------------------------------------------------------


def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """pydantic's reader of a type. InvalidRequest for what is none."""
    if isinstance(kind, Grammar | Mapping) or inspect.isroutine(kind):
        raise InvalidRequest(f"{name_of(kind)}: given as a type; allowed: a type (`gen` alone takes a Grammar too)")
    try:
        return TypeAdapter(kind)
    except PydanticSchemaGenerationError as error:
        said = str(error).partition(". Set ")[0]
        allowed = "types that pydantic knows, such as int, a dataclass or a BaseModel"
        raise InvalidRequest(f"{name_of(kind)}: given as a type; {said}; allowed: {allowed}") from error
    except (PydanticUserError, PydanticUndefinedAnnotation, SchemaError, RecursionError) as error:
        raise InvalidRequest(f"{name_of(kind)}: given as a type; {_first_line(error)}") from error


def schema_of(name: str, adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """The JSON schema of a type's values. InvalidRequest where no schema says what the type asks for."""
    try:
        return adapter.json_schema(schema_generator=ExactSchema)
    except PydanticUserError as error:
        raise InvalidRequest(f"{name}: it has no JSON form; {_first_line(error)}") from error


def grammar_of(schema: dict[str, Any], name: str) -> Grammar:
    """JSON of a schema. InvalidRequest, as the runtime's, with a note of the type that it is for."""
    try:
        return Grammar.json_schema(schema)
    except InvalidRequest as error:
        annotate(error, f"in the JSON schema of {name}")
        raise


class ExactSchema(GenerateJsonSchema):
    """pydantic's JSON schemas without what they are freer in than their types, which is refused.

    Objects have no further properties, except where a type asks for them.
    """

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # pydantic's

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never: a title is the field's name again."""
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        if schema["cls"] is BaseModel:
            self.handle_invalid_for_json_schema(schema, "BaseModel itself, which has no fields; name a class of it")
        return _closed(super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        if schema["cls"] is Grammar:
            self.handle_invalid_for_json_schema(schema, "a Grammar, which is no type; give one to gen")
        return _closed(super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        return _closed(super().typed_dict_schema(schema))

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        keys = schema.get("keys_schema")
        if keys is not None and keys["type"] not in ("str", "any"):
            self.handle_invalid_for_json_schema(schema, "keys other than str, which JSON does not have")
        return super().dict_schema(schema)

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        self._refuse(schema, "max_digits", "decimal_places")
        number, _text = super().decimal_schema(schema)["anyOf"]
        return dict(number)

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        self._refuse(schema, *_BOUNDS, "now_op")
        return _text(_DATE)

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        self._refuse(schema, *_BOUNDS, "tz_constraint")
        return _text(_TIME)

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        self._refuse(schema, *_BOUNDS, "now_op", "tz_constraint")
        return _text(f"{_DATE}T{_TIME}")

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:
        self._refuse(schema, *_BOUNDS)
        return _text(_DURATION)

    def is_subclass_schema(self, schema: Any) -> JsonSchemaValue:
        return self.handle_invalid_for_json_schema(schema, "classes, which no text is")

    def enum_schema(self, schema: Any) -> JsonSchemaValue:
        if not schema["members"]:
            self.handle_invalid_for_json_schema(schema, "an Enum without members")
        return super().enum_schema(schema)

    def complex_schema(self, schema: Any) -> JsonSchemaValue:
        return self.handle_invalid_for_json_schema(schema, "complex numbers")

    def _refuse(self, schema: Any, *constraints: str) -> None:
        for constraint in constraints:
            if schema.get(constraint) is not None:
                self.handle_invalid_for_json_schema(schema, f"{constraint} of a {schema['type']}")


def _text(pattern: str) -> JsonSchemaValue:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _closed(schema: JsonSchemaValue) -> JsonSchemaValue:
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def name_of(kind: object) -> str:
    """A type as its author wrote it, shortened."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else reprlib.repr(kind).replace("typing.", "")


def shown(text: str) -> str:
    """The end of a generated text, as messages quote it."""
    return json.dumps(text if len(text) <= 80 else f"...{text[-77:]}", ensure_ascii=False)


def _first_line(error: Exception) -> str:
    """What it says, but for how pydantic announces that."""
    first, _, rest = str(error).strip().partition("\n")
    return first if not isinstance(error, SchemaError) else " ".join(rest.split())
