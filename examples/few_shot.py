"""Few-shot questions as a batch: the shots are one prefix of all rows, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import radixrt as rx


@dataclass(frozen=True)
class QA:
    question: str
    answer: str


SHOTS = (QA("What is the capital of France?", "Paris"), QA("What is the capital of Italy?", "Rome"))
QUESTIONS = ("What is the capital of Japan?", "What is the capital of Spain?", "What is the capital of Egypt?")


@rx.program
def few_shot(s: rx.State, question: str, shots: Sequence[QA] = SHOTS) -> str:
    s += "Answer with one word.\n"
    for shot in shots:
        s += f"Q: {shot.question}\nA: {shot.answer}\n"
    s += f"Q: {question}\nA:"
    return s.gen(stop="\n", max_tokens=8, temperature=0.0).value.strip()


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    results = few_shot.batch(watched, [{"question": question} for question in QUESTIONS])
    for question, result in zip(QUESTIONS, results, strict=True):
        print(question, result.value if result.ok else result.error)
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
