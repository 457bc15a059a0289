"""Runs as OpenTelemetry spans: one for the program, for each branch and for each generation. Extra `otel`.

Knows no exporter: that is the application's own. All gen_ai names are in one table, as the conventions are still
"Development" (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixrt.runtime import InvalidRequest, Usage

from .events import BranchClosed, BranchOpened, RunEnded, RunEvent, RunStarted, SlotEnded, SlotStarted

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

GEN_AI = {
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "response": "gen_ai.response.id",
    "finish": "gen_ai.response.finish_reasons",
    "prompt": "gen_ai.usage.input_tokens",  # cached ones included
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "written": "gen_ai.usage.cache_creation.input_tokens",  # computed, which leaves them in the cache
    "completion": "gen_ai.usage.output_tokens",
    "error": "error.type",
}


class OpenTelemetry:
    """An observer: `program.options(observers=[OpenTelemetry])`. The run's span is a child of the caller's."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider`: the application's unless given. InvalidRequest where opentelemetry-api is absent."""
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise InvalidRequest(
                "observers: opentelemetry-api is not installed; pip install 'radixrt[otel]'"
            ) from error
        self._api: Any = trace
        self._tracer = trace.get_tracer("radixrt", tracer_provider=provider)
        self._branches: dict[tuple[int, ...], Span] = {}  # the run itself is ()
        self._slots: dict[tuple[tuple[int, ...], int], Span] = {}

    def tell(self, event: RunEvent) -> None:
        path = event.where.path
        match event:
            case RunStarted():
                said = {"radixrt.seed": event.seed} | ({"radixrt.row": event.row} if event.row is not None else {})
                self._branches[()] = self._tracer.start_span(f"program {event.where.program}", attributes=said)
            case BranchOpened():
                name = f"branch {'.'.join(map(str, path))}"
                self._branches[path] = self._tracer.start_span(name, self._below(path[:-1]))
            case BranchClosed():
                span = self._branches.pop(path)
                span.set_attribute("radixrt.adopted", event.adopted)
                span.end()
            case SlotStarted():
                self._slots[path, event.number] = self._slot(event)
            case SlotEnded():
                self._end(self._slots.pop((path, event.number)), event.error, _attributes(event))
            case RunEnded():
                self._end(self._branches.pop(()), event.error, {})

    def close(self) -> None:
        pass

    def _below(self, path: tuple[int, ...]) -> Any:
        return self._api.set_span_in_context(self._branches[path])

    def _slot(self, event: SlotStarted) -> Span:
        said = {
            GEN_AI["operation"]: "text_completion",
            GEN_AI["provider"]: "radixrt",
            GEN_AI["response"]: str(event.request),
            "radixrt.slot": event.name if event.name is not None else str(event.number),
        }
        if event.explanation is not None:
            said["radixrt.cache.matched"] = event.explanation.matched  # type: ignore[assignment]
        name = f"text_completion {event.name}" if event.name is not None else "text_completion"
        context = self._below(event.where.path)
        return self._tracer.start_span(name, context, kind=self._api.SpanKind.INTERNAL, attributes=said)

    def _end(self, span: Span, error: BaseException | None, attributes: dict[str, Any]) -> None:
        if error is not None:
            attributes = attributes | {GEN_AI["error"]: type(error).__name__}
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        span.set_attributes(attributes)
        span.end()


def _attributes(event: SlotEnded) -> dict[str, Any]:
    usage: Usage | None = event.usage
    counts = {}
    if usage is not None:
        counts = {
            GEN_AI["prompt"]: usage.prompt_tokens,
            GEN_AI["cached"]: usage.cached_tokens,
            GEN_AI["written"]: usage.computed_tokens,
            GEN_AI["completion"]: usage.completion_tokens,
        }
    measured = {"radixrt.grammar.seconds": event.grammar_seconds} if event.grammar_seconds else {}
    return counts | measured | {GEN_AI["finish"]: [event.finish]}
