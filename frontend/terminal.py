"""What the commands share towards the person at the terminal: notes, errors as one line, how an engine is opened.

Knows no command. Output goes to stdout; notes, progress and errors go to stderr.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from radixrt.runtime import Engine


def note(text: str) -> None:
    """One dim line on stderr; without colours where that is no terminal."""
    typer.secho(text, dim=True, err=True)


def fail(message: str, *, code: int = 2) -> NoReturn:
    """One `error:` line on stderr, whatever lines the message has, and the end of the command."""
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def printable(text: str) -> str:
    """Without control characters but line breaks and tabs: what a model writes must not steer the terminal."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def bytes_text(num_bytes: float, digits: int = 4) -> str:
    """A size in the largest unit that it has, once rounded, at least one of: `512 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        text = f"{num_bytes:.0f}" if num_bytes >= 1000 else f"{num_bytes:.{digits}g}"
        if float(text) < 1024:
            return f"{text} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.{digits}g} TiB"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns what a user can cause into a line and an exit code: 2 for what was refused, 130 for Ctrl-C.

    Everything else is a bug and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        note("\ninterrupted")
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise  # typer ends quietly where nobody reads on
    except Exception as error:
        from radixrt.runtime import RadixrtError  # late, because torch comes with it

        if not isinstance(error, RadixrtError | OSError):
            raise
        fail(str(error))


def open_engine(model: str, *, dtype: str, **settings: Any) -> Engine:
    """An engine with this model, loaded with a progress bar where it has to be converted first.

    Settings as for Engine; a wrong one is refused before the seconds that loading takes.
    """
    from radixrt.runtime import Engine, EngineConfig, load_model

    EngineConfig.of(settings)
    note(f"loading {model} in {dtype}")
    loaded, tokenizer = load_model(model, dtype=dtype, progress=sys.stderr.isatty())
    for line in loaded.notes:
        note(f"note: {line}")
    return Engine(loaded, tokenizer=tokenizer, **settings)
