"""JSON extraction: a typed value from each document, behind one instruction that is computed once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

import radixrt as rx

INSTRUCTION = """Read the text and write what it says of the person as JSON.

Text: Maria Lopez, 34, has taught at a school in Madrid for years.
JSON:
{"name": "Maria Lopez", "age": 34, "work": "teaching"}

"""
DOCUMENTS = (
    "John Smith is a 45 year old doctor from Boston.",
    "At 29, Aiko Tanaka already cooks for the best restaurant of the town.",
    "Peter, who is 61 now, has driven the same bus since he was young.",
)


class Person(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=24)]
    age: Annotated[int, Field(ge=0, le=120)]
    work: Literal["teaching", "medicine", "cooking", "driving", "other"]


@rx.program
def extract(s: rx.State, document: str) -> Person:
    s += INSTRUCTION
    s += f"Text: {document}\nJSON:\n"
    return s.gen(Person, max_tokens=120, temperature=0.0).value  # held to the type, token by token


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    results = extract.batch(watched, [{"document": document} for document in DOCUMENTS])
    for document, result in zip(DOCUMENTS, results, strict=True):
        print(document)
        print(f"  {result.value if result.ok else result.error}")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
