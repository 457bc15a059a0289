"""A batch over a file of rows: what they share is computed once, and a run that was killed goes on where it was."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import radixrt as rx

ROWS = """review,aspect
The soup was cold but the waiter made us laugh.,food
Two hours of rain and nobody wanted to leave.,weather
The soup was cold but the waiter made us laugh.,service
Two hours of rain and nobody wanted to leave.,mood
"""


@rx.program
def rate(s: rx.State, review: str, aspect: str) -> str:
    s += "Rate what a review says, in one word: good, bad or nothing.\n"
    s += f"Review: {review}\nIts {aspect}:"
    return s.gen(stop="\n", max_tokens=4, temperature=0.0).value.strip()


def main(engine: rx.Engine, folder: Path) -> None:
    watched = rx.Yardstick(engine)
    source = folder / "reviews.csv"
    if not source.exists():
        source.write_text(ROWS)
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    print(rate.plan(watched, rows))
    results = rate.batch(watched, rows, concurrency=2, resume=folder / "ratings.jsonl")
    for row, result in zip(rows, results, strict=True):
        print(f"{row['aspect']}: {result.value if result.ok else result.error}")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine, TemporaryDirectory() as folder:
        main(engine, Path(sys.argv[1] if len(sys.argv) > 1 else folder))
