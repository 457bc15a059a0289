"""Constrained decoding: outputs belong to their grammars, grammars change nothing else, and bad ones harm nobody."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st

from radixrt.runtime import Engine, Grammar, Handle, InvalidRequest, Output, SamplingParams, replay
from radixrt.runtime.constraint import MAX_COMPILED, Constraint, Grammars
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit, finish

EOS = 256
# What makes random texts end: quotes, closing brackets, the end itself.
ENDS = {34: 2.0, 93: 2.0, 125: 2.0, EOS: 2.0}

NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
CALL = {"type": "object", "properties": {"tool": {"const": "add"}, "x": {"type": "number"}}, "required": ["tool", "x"]}
DONE = {"type": "object", "properties": {"tool": {"const": "done"}}, "required": ["tool"]}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object of these properties, all required, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


SCHEMAS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]+[0-9]*$", "minLength": 4, "maxLength": 7},
    {"type": "string", "pattern": r"^\w{3}\s\W\d$"},
    {"type": "string", "pattern": r"^[^\s\d]\S\D[^\w]$"},
    {"type": "string", "pattern": '^["\\\\/\\n]{4}$'},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "integer", "exclusiveMinimum": 3, "maximum": 17},
    {"type": "integer", "multipleOf": 7, "minimum": 10},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "multipleOf": 0.25},
    {"type": ["string", "null"], "minLength": 2},
    {"type": "boolean"},
    {"enum": ["a", 1, None, {"b": [True, 2.5]}, "é\n"]},
    {"const": {"a": [1, {"b": None}]}},
    closed({"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}),
    closed({"a": closed({"b": closed({"c": {"type": "array", "items": {"type": "boolean"}}})})}),
    closed({"ä": {"enum": ["ö", "ü"]}, "日": {"type": "null"}}),
    {"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    {"type": "array", "items": {"$ref": "#"}},
    {"oneOf": [CALL, DONE]},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "object", "title": "b"}]},
    {},
]
PATTERNS = [
    "[ab]{2,4}",
    r"\d{3}-\d{4}",
    r"\w+ \w+",
    r"[\w.]+@[^\W\d_]+",
    r"[^\s]\S[^\S]\s",
    "[àé]?(x|yz)+",
    "(?i)kiss",
    "(?s:a.b)",
    "a.b",
    r"[\[&~-]+]?",
    "[]^]+[^]^]",
    r"\x41\u00e9\t\\",
    "(?P<year>[12][0-9]{3})(-[0-9]{2}){0,2}",
    r"[\u0400-\u04ff]{1,5}",
    "(a|b)*?c",
]
OPTIONS = ["yes", "no", "maybe é", 'a"b\\c\n', "yes sir", "[x]*"]
LARKS = {
    'start: "(" [start] ")"': r"\(+\)+",
    'start: NUM ("+" NUM)*\nNUM: /[0-9]+/': r"[0-9]+(\+[0-9]+)*",
    'start: "<" %json {"type": "integer", "minimum": 5} ">"': r"<[0-9]+>",
}
MAKERS: list[tuple[Any, Any]] = [(Grammar.json_schema, schema) for schema in SCHEMAS] + [
    (Grammar.regex, pattern) for pattern in PATTERNS
]
GRAMMARS = [make(given) for make, given in MAKERS] + [Grammar.lark(lark) for lark in LARKS] + [Grammar.choice(OPTIONS)]


def make_model(vocab: int = 257) -> HashModel:
    return HashModel(vocab=vocab, eos=frozenset([EOS]) if vocab > EOS else frozenset())


def belongs(text: str, grammar: Grammar) -> bool:
    """Whether a text is one of the grammar's, asked of somebody else."""
    match grammar.kind:
        case "json_schema":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            validator = jsonschema.Draft202012Validator(json.loads(grammar.source), format_checker=checker)
            return bool(validator.is_valid(json.loads(text)))
        case "regex":
            return re.fullmatch(grammar.source, text) is not None
        case "choice":
            return text in json.loads(grammar.source)
        case "lark":
            return re.fullmatch(LARKS[grammar.source], text) is not None


def follow(grammar: Grammar, text: str) -> Constraint | None:
    """The place behind a text in a grammar over bytes; None where it does not go on there."""
    try:
        return Grammars(ByteTokenizer(), 256).start(grammar, frozenset(), list(text.encode()))
    except InvalidRequest:
        return None


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: f"{grammar.kind}:{grammar.source[:40]}")
def test_outputs_belong_to_their_grammar(grammar: Grammar, make_engine: MakeEngine, profile: str) -> None:
    engine = make_engine(make_model(), num_pages=4096)
    count = 20 if profile == "deep" else 2
    params = [
        SamplingParams(n=count, grammar=grammar, logit_bias=ENDS, max_tokens=3000, temperature=temperature, seed=1)
        for temperature in (1.0, 0.3)
    ]
    choices = [choice for given in params for choice in engine.generate("text", given)[0].choices]
    assert {choice.finish_reason for choice in choices} == {"stop"}
    for choice in choices:
        text = bytes(token_id for token_id in choice.token_ids if token_id != EOS).decode()
        assert choice.text == text
        assert belongs(text, grammar), text


@given(st.lists(st.integers(0, 127), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from([0.0, 1.0]))
def test_grammar_that_accepts_everything_changes_nothing(prompt: list[int], n: int, temperature: float) -> None:
    def run(grammar: Grammar | None) -> Output:
        model, tokenizer = HashModel(vocab=128, eos=frozenset([0])), ByteTokenizer(frozenset([0]))
        with Engine(model, tokenizer=tokenizer, num_pages=64) as engine:
            params = SamplingParams(n=n, max_tokens=20, temperature=temperature, grammar=grammar, presence_penalty=1.0)
            return engine.generate([prompt], params)[0]

    assert run(Grammar.regex("(?s:.*)")) == run(None)


@given(
    grammar=st.sampled_from(GRAMMARS),
    page_size=st.sampled_from([1, 4, 16]),
    slack=st.integers(0, 3),
    token_budget=st.sampled_from([3, 64]),
    n=st.sampled_from([1, 3]),
    prefix_cache=st.booleans(),
)
def test_tokens_without_a_choice_need_no_row_of_their_own(
    *, grammar: Grammar, page_size: int, slack: int, token_budget: int, n: int, prefix_cache: bool
) -> None:
    """Fed in chunks, preempted or not, they and what follows them are those that a row for each would have given."""

    def run(logprobs: int | None, num_pages: int) -> tuple[list[Any], int]:
        settings: dict[str, Any] = {"page_size": page_size, "token_budget": token_budget, "prefix_cache": prefix_cache}
        engine = Engine(make_model(), tokenizer=ByteTokenizer(), num_pages=num_pages, poison=True, **settings)
        params = SamplingParams(n=n, grammar=grammar, max_tokens=24, logit_bias=ENDS, logprobs=logprobs, seed=3)
        outputs = engine.generate(["ab", "abc"], params)
        decoded = engine.stats().counters.decoded
        audit(engine)
        return [(c.token_ids, c.text, c.finish_reason) for out in outputs for c in out.choices], decoded

    few = branch_pages(3, 27, n, page_size) + slack
    forced, decoded = run(None, few)
    one_by_one, as_many = run(0, 1000)
    assert forced == one_by_one
    assert decoded <= as_many


def test_forced_tokens_are_fed_together(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    (output,) = engine.generate("text", SamplingParams(grammar=Grammar.choice(["a" + "x" * 30 + "yz", "b" * 33])))
    assert output.text[0] in "ab"
    assert len(output.text) == 33
    assert output.choices[0].forced == tuple(range(1, 33))
    counters = engine.stats().counters
    assert (counters.steps, counters.computed, counters.decoded) == (1, 4, 0)  # all but the first follow from it
    (output,) = engine.generate("text", SamplingParams(grammar=Grammar.regex("a{9}[bc]d{9}")))
    assert engine.stats().counters.steps == 3
    assert engine.stats().counters.decoded == 9
    assert output.choices[0].forced == (*range(9), *range(10, 19))


@given(st.sampled_from(GRAMMARS), st.integers(0, 40), st.integers(0, 2**32))
def test_place_is_the_same_by_steps_by_copy_and_anew(grammar: Grammar, length: int, seed: int) -> None:
    grammars, draw = Grammars(ByteTokenizer(), 256), random.Random(seed)
    place, text = grammars.start(grammar, frozenset(), []), list[int]()
    while len(text) < length and not place.is_complete:
        allowed = place.allowed.nonzero()[0].tolist()
        assert place.forced is None or allowed == [place.forced]
        text.append(draw.choice(allowed))
        before, copied = place, place.copy()
        copied.advance(text[-1])
        grammars.look([copied])
        assert before.is_seen  # what a copy does stays with it
        place = copied
    rebuilt = place.rebuilt(text)
    assert rebuilt is not None
    grammars.look([rebuilt])
    assert (rebuilt.allowed == place.allowed).all()
    assert (rebuilt.forced, rebuilt.is_complete, rebuilt.error) == (place.forced, place.is_complete, place.error)


@pytest.mark.parametrize(
    "pattern", [r"\w", r"\W", r"\s", r"\S", r"\d", r"\D", ".", r"[\w]", r"[^\w]", r"[^\W]", r"[^\s]"]
)
def test_classes_mean_at_most_what_they_mean_in_python(pattern: str, profile: str) -> None:
    """Rust's have other letters, marks and spaces in them."""
    step = 1 if profile == "deep" else 499
    codes = [*range(0x700), *range(0x700, 0x110000, step), 0x1C89, 0x203F, 0x3000]
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    place = follow(Grammar.regex(f"{pattern}?"), "")
    assert place is not None
    accepted = {char for char in characters if place.rebuilt(list(char.encode())) is not None}
    assert {char for char in accepted if not re.fullmatch(pattern, char)} == set()
    ascii_characters = {chr(code) for code in range(128)} - {*map(chr, range(0x1C, 0x20))}
    assert accepted & ascii_characters == {char for char in ascii_characters if re.fullmatch(pattern, char)}


REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "'not'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "contains": {}}, "'contains'"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"patternProperties": {"^a": {}}}, "'patternProperties'"),
    ({"propertyNames": {"pattern": "a"}}, "'propertyNames'"),
    ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"type": "string", "nullable": True}, "'nullable'"),
    ({"type": "string", "colour": 3}, "'colour'"),
    ({"type": "string", "not": {}, "x-guidance": {"lenient": True}}, "cannot be enforced"),
    ({"properties": {"a": {"items": {"$dynamicRef": "#x"}}}}, r"'\$dynamicRef'"),
    ({"type": "string", "format": "int32"}, "format"),
    ({"format": ["date"]}, "format"),
    ({"minProperties": 2}, "minProperties"),
    ({"items": [{}, {}]}, "a list|of 2 items"),
    ({"properties": [1]}, "properties"),
    ({"anyOf": {"a": 1}}, "anyOf"),
    ({"exclusiveMinimum": True, "minimum": 3}, "exclusiveMinimum"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "pattern": "(?=a)"}, "allowed: groups"),
    ({"type": "string", "pattern": "a++"}, "possessive"),
    ({"type": "string", "pattern": r"\bfoo\b"}, "cannot be enforced"),
    ({"enum": ["a\x01"]}, "control character"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"$ref": "http://example.org/x"}, "cannot be enforced"),
    ({"$ref": "#/$defs/none"}, "cannot be enforced"),
    (True, "cannot be read"),
    ("{", "no JSON"),
    ({"const": float("nan")}, "no JSON"),
    ({"a": {1, 2}}, "no JSON"),
]


@pytest.mark.parametrize(
    ("schema", "message"), REFUSED_SCHEMAS, ids=[str(schema)[:50] for schema, _ in REFUSED_SCHEMAS]
)
def test_a_keyword_that_cannot_be_enforced_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        Grammar.json_schema(schema)
    assert "\n" not in str(refused.value)
    if isinstance(schema, dict) and "no JSON" not in message:
        with pytest.raises(InvalidRequest):
            Grammar.lark("start: %json " + json.dumps(schema))


def nested(count: int) -> str:
    return '{"type": "array", "items": ' * count + "{}" + "}" * count


# What has killed or stalled other engines (tests of CVE-2026-55574, CVE-2026-25048, GHSA-5cmr-4px5-23pc,
# CVE-2025-58446), and what would kill or stall llguidance 1.9 without our limits.
ADVERSARIAL = {
    "nested counts": lambda: Grammar.regex("(a{1,100}){1,100}"),
    "nested counts in a pattern": lambda: Grammar.json_schema({"pattern": "^((a{1,20}){1,20}b){1,20}$"}),
    "30,000 groups": lambda: Grammar.regex("(" * 30_000 + "a" + ")" * 30_000),
    "30,000 groups in lark": lambda: Grammar.lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "30,000 arrays": lambda: Grammar.json_schema("[" * 30_000),
    "1,000 nested schemas": lambda: Grammar.json_schema(nested(1000)),
    "a constant of 5,000 arrays": lambda: Grammar.json_schema('{"const": ' + "[" * 5000 + "]" * 5000 + "}"),
    "a rule that is itself": lambda: Grammar.lark("start: start"),
    "rules that are each other": lambda: Grammar.lark("start: a\na: b\nb: a"),
    "a schema that is itself": lambda: Grammar.json_schema({"$ref": "#"}),
    "an enum of 50,000": lambda: Grammar.json_schema({"enum": [f"option {i}" for i in range(50_000)]}),
    "50,000 options": lambda: Grammar.choice([f"option {i}" for i in range(50_000)]),
    "20,000 alternatives": lambda: Grammar.lark("start: " + "|".join(f'"{i}"' for i in range(20_000))),
    "3,000 properties": lambda: Grammar.json_schema({"properties": {f"p{i}": {"type": "null"} for i in range(3000)}}),
    "a chain of 3,000 rules": lambda: Grammar.lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
    ),
    "a chain of 2,000 references": lambda: Grammar.json_schema(
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)} | {"2000": {}}}
    ),
    "an automaton of a million states": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 1_000_003}),
    "one of two": lambda: Grammar.json_schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
    "no text": lambda: Grammar.regex(r"[^\x00-\U0010FFFF]"),
    "no text, by classes": lambda: Grammar.regex(r"[^\s\S]"),
    "the empty text": lambda: Grammar.regex(""),
    "a megabyte": lambda: Grammar.regex("a" * 2**20),
    "a lone surrogate": lambda: Grammar.regex("\ud800"),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_grammars_are_refused_at_once(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    params = SamplingParams(max_tokens=8, seed=0, ignore_eos=True)
    alone = engine.generate("neighbour", params)[0].choices
    handle = engine.submit("neighbour", params)
    events = engine.step()
    started = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        engine.submit("x", SamplingParams(grammar=ADVERSARIAL[name]()))
    assert time.process_time() - started < 1
    assert len(str(refused.value)) < 300
    while engine.stats().num_running:
        events += engine.step()
    assert {event.handle for event in events} == {handle}
    assert events[-1].output.choices == alone  # type: ignore[union-attr]


def test_steps_of_a_grammar_that_explodes_are_bounded(make_engine: MakeEngine) -> None:
    """It may pass where it is made; then each of its steps is bounded, and it ends alone."""
    engine = make_engine(make_model())
    bomb = Grammar.lark("start: /((a{1,1000}){1,1000}){1,1000}/ | /(.*a.{300}b.*){3}/")
    neighbour = SamplingParams(max_tokens=100, ignore_eos=True, seed=5)
    expected = engine.generate("neighbour", neighbour)[0].choices[0].token_ids
    engine.submit("bomb", SamplingParams(grammar=bomb, logit_bias={97: 20.0}, max_tokens=200))
    handle = engine.submit("neighbour", neighbour)
    tokens, slowest = [], 0.0
    while engine.stats().num_running or engine.stats().num_waiting:
        started = time.process_time()
        events = engine.step()
        slowest = max(slowest, time.process_time() - started)
        tokens += [event.token_id for event in events if event.handle == handle and hasattr(event, "token_id")]
    assert tuple(tokens) == expected
    assert slowest < 0.5


def test_text_that_the_vocabulary_cannot_continue_ends_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=70))  # ids up to "E"
    params = SamplingParams(max_tokens=4, seed=1)
    expected = engine.generate([[1, 2]], params)[0].choices
    handle = engine.submit([1, 2], SamplingParams(grammar=Grammar.regex("A(B|C)(b|c)")))
    outputs = engine.generate([[1, 2]], params)
    assert outputs[0].choices == expected
    (failed,) = [event.output for event in engine.step() if event.handle == handle and hasattr(event, "output")]
    assert failed.choices[0].finish_reason == "error"
    assert "no token of the vocabulary" in str(failed.choices[0].error)
    with pytest.raises(InvalidRequest, match="no token of the vocabulary"):
        engine.submit([1], SamplingParams(grammar=Grammar.regex("b")))


def test_how_a_grammar_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())

    def ends(pattern: str, **given: Any) -> tuple[str, str]:
        params = {"temperature": 0.0, "max_tokens": 20} | given
        (choice,) = engine.generate("text", SamplingParams(grammar=Grammar.regex(pattern), **params))[0].choices
        return choice.text, choice.finish_reason

    assert ends("a{5}") == ("aaaaa", "stop")
    assert ends("a{5}", max_tokens=5) == ("aaaaa", "stop")  # complete, not cut
    assert ends("a{5}", max_tokens=4) == ("aaaa", "length")
    assert ends("a{5}", min_tokens=9) == ("aaaaa", "stop")  # nothing can follow
    assert ends("a+", logit_bias={EOS: 50.0}) == ("a", "stop")
    assert ends("a+", logit_bias={EOS: 50.0}, min_tokens=4) == ("aaaa", "stop")
    assert ends("a+", logit_bias={EOS: 50.0}, ignore_eos=True) == ("a" * 20, "length")
    assert ends("aab|b", stop_token_ids=[98], logit_bias={98: 50.0}) == ("aa", "error")  # what ends cannot be text
    assert ends("a+b?", stop_token_ids=[98], logit_bias={98: 50.0}) == ("a", "stop")
    assert ends("a+", stop="aaa", ignore_eos=True) == ("", "stop")
    assert ends("[abc]x", logit_bias={120: 100.0, 97: -100.0, 99: -100.0}) == ("bx", "stop")


def test_forks_and_truncation_keep_the_place(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    grammar = Grammar.json_schema(closed({"name": {"type": "string", "maxLength": 9}, "ok": {"type": "boolean"}}))
    params = SamplingParams(grammar=grammar, logit_bias=ENDS, max_tokens=200, n=2, seed=2)
    handle = engine.submit("text", params)
    for _ in range(3):
        engine.step()
    live = engine.fork(handle, 2, choice=1)  # in the middle of the text, wherever that is
    outputs: dict[Handle, Output] = {}
    while len(outputs) < 3:
        outputs |= {event.handle: event.output for event in engine.step() if hasattr(event, "output")}
    prefix_len = len(outputs[live[0]].prompt_token_ids) - 4
    begun = bytes(outputs[handle].choices[1].token_ids[:prefix_len]).decode(errors="ignore")
    for child in live:
        tail = bytes(outputs[child].choices[0].token_ids)
        text = (bytes(outputs[child].prompt_token_ids[4:]) + tail).decode()
        assert text.startswith(begun)
        assert belongs(text, grammar)
    whole = outputs[handle].choices[0].token_ids
    (ended,) = engine.fork(handle, at=4 + 9)  # of one that has ended, from within its text
    assert whole[:9] == tuple(engine._loop.requests.of(ended.number).branches[0].tokens[4:])
    engine.step()
    engine.truncate(ended, 13)
    while engine.stats().num_running:
        events = engine.step()
    text = bytes(whole[:9] + events[-1].output.choices[0].token_ids).decode()  # type: ignore[union-attr]
    assert belongs(text, grammar)
    with pytest.raises(InvalidRequest, match="does not go on"):
        engine.fork(handle)  # nothing can be added
    anew = engine.fork(handle, text="x")[0]  # which begins a text of its own
    again = engine.fork(handle, params=SamplingParams(grammar=Grammar.choice(["q"])))[0]
    while engine.stats().num_running or engine.stats().num_waiting:
        outputs |= {event.handle: event.output for event in engine.step() if hasattr(event, "output")}
    assert belongs(outputs[anew].text, grammar)
    assert outputs[again].text == "q"


def test_adopted_tokens_are_no_text_of_the_grammar(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    parent = engine.generate("t", SamplingParams(grammar=Grammar.choice(["ab"])))[0].handle
    (child,) = engine.fork(parent, params=SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.stats().num_running or engine.stats().num_waiting:
        engine.step()
    engine.adopt(parent, child)
    (last,) = engine.fork(parent)  # with the parent's parameters, from the end
    while engine.stats().num_running or engine.stats().num_waiting:
        events = engine.step()
    assert events[-1].handle == last
    assert events[-1].output.text.endswith("ab")  # type: ignore[union-attr]


def test_best_of_and_logprobs_are_raw(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    grammar = Grammar.regex("[a-f]{3}")
    params = SamplingParams(n=2, best_of=5, grammar=grammar, logprobs=2, seed=4)
    (output,) = engine.generate("text", params)
    assert all(belongs(choice.text, grammar) for choice in output.choices)
    for choice in output.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == 3
        assert any(token.sampled not in token.top for token in choice.logprobs)  # others were more probable
    sums = [sum(token.sampled.logprob for token in choice.logprobs or ()) for choice in output.choices]
    assert sums == sorted(sums, reverse=True)


def test_time_of_grammars_is_told_and_adds_up(make_engine: MakeEngine) -> None:
    """On a clock that ticks at each reading: a start takes three ticks, and a look one that its sequences share."""
    engine = make_engine(clock=map(float, itertools.count()).__next__)
    held = SamplingParams(grammar=Grammar.regex("[ab]{6}"), max_tokens=8)
    first, second, free = engine.generate([[1, 2], [1, 2]], held) + engine.generate(
        [[1, 2]], SamplingParams(max_tokens=8)
    )
    assert [output.choices[0].grammar_seconds for output in (first, second, free)] == [3 + 6 / 2, 3 + 6 / 2, 0]

    parent = engine.submit([1, 2], held)
    engine.step()
    engine.step()
    [child] = engine.fork(parent)
    engine.step()
    engine.truncate(parent, 3)  # which looks once more, and then samples two tokens anew beside the child's last three
    ended = finish(engine)
    assert ended[parent].choices[0].grammar_seconds == 3 + 2 + 1 / 2 + 1 + 3 / 2 + 2
    assert ended[child].choices[0].grammar_seconds == 3 + 1 / 2 + 3 / 2


def test_a_clock_that_fails_tells_no_time_of_grammars(make_engine: MakeEngine) -> None:
    def broken() -> float:
        raise OSError("no clock here")

    for clock in (broken, map(float, itertools.count(0, -1)).__next__):
        engine = make_engine(clock=clock)
        [output] = engine.generate([[1, 2]], SamplingParams(grammar=Grammar.regex("[ab]{6}")))
        assert output.choices[0].grammar_seconds == 0


def test_compiled_grammars_are_bounded_and_none_in_use_goes() -> None:
    grammars = Grammars(ByteTokenizer(), 256)
    used = [grammars.start(Grammar.regex(f"u{i}x*"), frozenset(), []) for i in range(5)]
    for i in range(2 * MAX_COMPILED):
        grammars.start(Grammar.regex(f"a{i}"), frozenset(), [])
    assert len(grammars._compiled) == MAX_COMPILED
    assert all(Grammar.regex(f"u{i}x*") in grammars._compiled for i in range(5))
    for place in used:
        again = place.rebuilt(list(b"u"))
        assert again is not None
    many = [grammars.start(Grammar.regex(f"m{i}x*"), frozenset(), []) for i in range(MAX_COMPILED + 10)]
    assert len(grammars._compiled) >= len(many)
    del many, used, place, again
    grammars.start(Grammar.regex("last"), frozenset(), [])
    assert len(grammars._compiled) == MAX_COMPILED


class Spaced(ByteTokenizer):
    """One that normalises: it puts a space in front and knows no capitals."""

    __slots__ = ()

    def encode(self, text: str) -> list[int]:
        return list((" " + text.lower()).encode())


def test_a_tokenizer_that_normalises_cannot_spoil_a_mask(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model(), tokenizer=Spaced())
    grammar = Grammar.json_schema(closed({"Name": {"enum": ["ÄB", "Cd"]}}))
    (choice,) = engine.generate("text", SamplingParams(grammar=grammar))[0].choices
    assert choice.finish_reason == "stop"
    assert belongs(choice.text, grammar)


def test_engine_without_a_tokenizer_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(tokenizer=None)
    with pytest.raises(InvalidRequest, match="where the engine has no tokenizer"):
        engine.submit([1], SamplingParams(grammar=Grammar.choice(["a"])))


def test_grammars_are_values_and_go_through_a_record(tmp_path: Path) -> None:
    for grammar in GRAMMARS:
        params = SamplingParams(grammar=grammar)
        again = SamplingParams(**json.loads(json.dumps(params.to_dict())))
        assert again == params
        assert hash(again) == hash(params)
    for wrong in ({"regex": "a", "lark": "b"}, {"gbnf": "a"}, {"regex": 3}, {}, "a", 3):
        with pytest.raises(InvalidRequest, match="grammar"):
            SamplingParams(grammar=wrong)  # type: ignore[arg-type]
    for choices in ([], "ab", [""], [1], None):
        with pytest.raises(InvalidRequest, match="grammar"):
            Grammar.choice(choices)  # type: ignore[arg-type]
    file = tmp_path / "run.jsonl"
    with Engine(make_model(), tokenizer=ByteTokenizer(), num_pages=64, record=file) as engine:
        handle = engine.submit("ab", SamplingParams(n=2, grammar=GRAMMARS[18], logit_bias=ENDS))
        engine.step()
        engine.fork(handle)
        while engine.stats().num_running:
            engine.step()
    assert replay(file).difference is None
