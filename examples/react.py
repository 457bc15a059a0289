"""ReAct: the model calls typed tools until it answers; its own words are never encoded or computed again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

import radixrt as rx

Number = Annotated[int, Field(ge=-9999, le=9999)]
MAX_TURNS = 3
QUESTIONS = ("What is 12 times 7?", "What is 40 and 2?")


def multiply(a: Number, b: Number) -> int:
    """a times b"""
    return a * b


def add(a: Number, b: Number) -> int:
    """a and b together"""
    return a + b


TOOLS = (multiply, add)
SHOT = """Question: What is 3 times 5?
{"name": "multiply", "arguments": {"a": 3, "b": 5}}
Result: 15
{"answer": "15"}

"""


class TooManyTurns(Exception):
    pass


@rx.program
def react(s: rx.State, question: str) -> tuple[str, rx.Cost]:
    s += f"Answer the question. Call these tools, or give the answer:\n{rx.describe(TOOLS)}\n{SHOT}"
    s += f"Question: {question}\n"
    for _ in range(MAX_TURNS):
        turn = s.act(TOOLS, max_tokens=64, temperature=0.0).value
        if isinstance(turn, rx.Answer):
            return turn.value, s.cost
        result = turn.run()
        print(f"  {turn.name} {turn.text} -> {result}")
        s += f"\nResult: {result}\n"
    raise TooManyTurns(f"no answer after {MAX_TURNS}")


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    for question in QUESTIONS:
        print(question)
        try:
            answer, cost = react.run(watched, question)
            print(f"  {answer!r}: {cost.generations} turns, {cost.computed_tokens} tokens computed")
        except (TooManyTurns, rx.GenerationFailed) as error:
            print(f"  {error}")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
