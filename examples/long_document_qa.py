"""Questions about one long document: it is the prefix of all of them and computed once, however many are asked."""

from __future__ import annotations

import radixrt as rx

SECTIONS = (
    ("Opening hours", "The library is open from nine to six on weekdays and from ten to two on Saturdays."),
    ("Cards", "A card is free for residents, costs ten euros a year for everybody else, and is made at the desk."),
    ("Loans", "Books are lent for four weeks and films for one. A loan is extended once unless somebody waits for it."),
    ("Fees", "A late book costs twenty cents a day, at most the price of the book. Children pay nothing."),
    ("Rooms", "The two reading rooms are silent. The workshop on the first floor can be booked for groups of six."),
)
DOCUMENT = "\n\n".join(f"{number}. {title}\n{text}" for number, (title, text) in enumerate(SECTIONS, 1))
QUESTIONS = (
    "How long are books lent?",
    "What does a card cost for residents?",
    "When does the library close on Saturdays?",
    "What do children pay for a late book?",
)


@rx.program
def long_document_qa(s: rx.State, document: str, questions: tuple[str, ...]) -> tuple[list[str], rx.Cost]:
    """An answer to each question, and what they cost together."""
    s += f"{document}\n\nQuestions about this text, with short answers.\n"
    with s.fork(questions) as branches:

        def answer(branch: rx.State, question: str) -> str:
            branch += f"Question: {question}\nAnswer:"
            return branch.gen(stop="\n", max_tokens=12, temperature=0.0).value.strip()

        answers = branches.map(answer)
    return answers, s.cost


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    answers, cost = long_document_qa.run(watched, DOCUMENT, QUESTIONS)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer}")
    print(f"{cost.prompt_tokens} prompt tokens")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
