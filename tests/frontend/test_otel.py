"""OpenTelemetry: a span each for the program, its branches and its slots, under the names of the conventions."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import radixrt as rx
from radixrt.frontend.otel import GEN_AI
from radixrt.runtime import Engine

from .conftest import audit

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


@rx.program
def judge(s: rx.State, essay: str) -> list[str]:
    s += f"Essay: {essay}. "
    s.gen(name="summary", max_tokens=3)
    with s.fork(2) as branches:
        marks = branches.map(lambda b: b.gen(max_tokens=4).value)
        s.adopt(branches[1])
    if essay == "bad":
        raise ValueError(essay)
    return marks


@pytest.fixture
def spans() -> Any:
    """Make the options of a program, and give what was exported."""

    class Spans:
        def __init__(self) -> None:
            self.exporter = memory.InMemorySpanExporter()
            self.provider = sdk.TracerProvider()
            self.provider.add_span_processor(export.SimpleSpanProcessor(self.exporter))

        def observer(self) -> rx.OpenTelemetry:
            return rx.OpenTelemetry(self.provider)

        def finished(self) -> list[Any]:
            return list(self.exporter.get_finished_spans())

    return Spans()


def test_spans_are_a_tree_with_the_tokens_of_each_slot(engine: Engine, spans: Any) -> None:
    with spans.provider.get_tracer("app").start_as_current_span("request"):
        judge.options(observers=[spans.observer]).run(engine, "good")
    found = spans.finished()
    by_id = {span.context.span_id: span.name for span in found}
    parents = sorted((span.name, by_id.get(span.parent.span_id) if span.parent else None) for span in found)
    assert parents == [
        ("branch 0", "program judge"),
        ("branch 1", "program judge"),
        ("program judge", "request"),
        ("request", None),
        ("text_completion", "branch 0"),
        ("text_completion", "branch 1"),
        ("text_completion summary", "program judge"),
    ]
    [summary] = [span for span in found if span.name == "text_completion summary"]
    assert summary.attributes[GEN_AI["prompt"]] == len("Essay: good. ")
    assert summary.attributes[GEN_AI["completion"]] == 3
    assert summary.attributes[GEN_AI["finish"]] == ("length",)
    assert summary.start_time < summary.end_time
    slots = [span for span in found if GEN_AI["prompt"] in span.attributes]
    computed = sum(span.attributes[GEN_AI["written"]] for span in slots)
    for span in slots:
        assert (
            span.attributes[GEN_AI["cached"]] + span.attributes[GEN_AI["written"]] <= span.attributes[GEN_AI["prompt"]]
        )
    assert computed == sum(judge_cost(engine).values())
    adopted = {span.name: span.attributes["radixrt.adopted"] for span in found if span.name.startswith("branch")}
    assert adopted == {"branch 0": False, "branch 1": True}


def judge_cost(engine: Engine) -> dict[str, int]:
    """What the engine counted, where a branch's first generated token is prompt to its slot."""
    counters = engine.stats().counters
    return {"given": counters.computed, "last token of the summary, in each branch": 2}


def test_an_error_is_on_its_span(engine: Engine, spans: Any) -> None:
    with pytest.raises(ValueError, match="bad"):
        judge.options(observers=[spans.observer]).run(engine, "bad")
    [run] = [span for span in spans.finished() if span.name == "program judge"]
    assert run.status.status_code.name == "ERROR"
    assert run.attributes[GEN_AI["error"]] == "ValueError"
    audit(engine)


def test_rows_of_a_batch_are_spans_of_their_own(engine: Engine, spans: Any) -> None:
    judge.options(observers=[spans.observer]).batch(engine, [{"essay": essay} for essay in ("a", "b", "bad")])
    runs = [span for span in spans.finished() if span.name == "program judge"]
    assert sorted(span.attributes["radixrt.row"] for span in runs) == [0, 1, 2]
    assert len({span.context.trace_id for span in runs}) == 3


def test_the_names_are_those_of_the_conventions() -> None:
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI")}
    assert {name for name in GEN_AI.values() if name.startswith("gen_ai")} <= known


def test_without_the_library_only_who_asks_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert len(judge.run(engine, "good")) == 2
    with pytest.raises(rx.InvalidRequest, match=r"opentelemetry-api is not installed.*radixrt\[otel\]"):
        judge.options(observers=[rx.OpenTelemetry]).run(engine, "good")
