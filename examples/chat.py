"""A chat of several turns: each sends and computes only what is new, and one turn is taken back."""

from __future__ import annotations

import radixrt as rx

TURNS = ("Name a fruit.", "And a vegetable?")


def main(engine: rx.Engine) -> None:
    watched = rx.Yardstick(engine)
    with rx.session(watched, system="Be brief.") as chat:
        for turn in TURNS:
            reply = chat.send(turn, max_tokens=16, temperature=0.0)
            print(f"> {turn}\n{reply}")
            print(f"  {reply.usage.computed_tokens} of {reply.usage.prompt_tokens} prompt tokens computed")
        mark = chat.mark()
        print(f"> Again?\n{chat.send('Again?', max_tokens=8)}")
        chat.rewind(mark)
        print(f"{len(chat.messages)} messages remain")
    print(watched)


if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        main(engine)
