"""The `radixrt` command: generate, demo, verify, info, plan, replay, trace.

Knows nothing of models or caching. Imports of the runtime stand inside the commands, because torch comes with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .terminal import fail, note, open_engine, plain_errors, printable

if TYPE_CHECKING:
    from radixrt.runtime import Engine, Output

app = typer.Typer(
    help="Generate text over shared, paged KV: no shared token is computed twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help="Name, directory or hub id of the model.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
PageSize = Annotated[int, typer.Option(help="Tokens per page.")]
KVMemory = Annotated[str, typer.Option(help="Size of the KV pool.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - or none: read from stdin.")] = "-",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,  # noqa: FBT002
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this much probability, in (0, 1].")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.", show_default="the engine's")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; repeatable.")] = None,
    page_size: PageSize = 16,
    kv_memory: KVMemory = "512MiB",
    dtype: Dtype = "float32",
    record: Annotated[Path | None, typer.Option(help="Write the run here, for `radixrt replay`.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what the cache matched, before and after.")] = False,  # noqa: FBT002
) -> None:
    """Answer a prompt. Text goes to stdout as it comes, everything else to stderr."""
    with plain_errors():
        text = _prompt_text(prompt)
        from radixrt.runtime import FinishEvent, SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
        )
        settings = {"page_size": page_size, "kv_memory": kv_memory, "record": record}
        with open_engine(model, dtype=dtype, **settings) as engine:
            assert engine.tokenizer is not None, "models that are loaded come with their tokenizer"
            ids = engine.tokenizer.encode(text) if raw else engine.tokenizer.chat([{"role": "user", "content": text}])
            if explain:
                note(f"before: {_explanation(engine, ids)}")
            started = perf_counter()
            shown = printable if sys.stdout is not None and sys.stdout.isatty() else str
            for event in engine.stream(ids, params):
                if isinstance(event, FinishEvent):
                    output = event.output
                else:
                    typer.echo(shown(event.text), nl=False)
            typer.echo()
            note(_usage(output, perf_counter() - started))
            if explain:
                note(f"after:  {_explanation(engine, [*ids, *output.choices[0].token_ids])}")
            if output.choices[0].error is not None:
                fail(output.choices[0].error, code=1)


@app.command()
def demo(model: Model = "smollm2-135m", kv_memory: KVMemory = "512MiB", dtype: Dtype = "float32") -> None:
    """Answer eight questions that share a prompt, fork one into four, and count what was computed.

    The exit code is 1 where more was computed than the prompts' token trie holds.
    """
    with plain_errors():
        from .demo import run

        if not run(open_engine(model, dtype=dtype, kv_memory=kv_memory), Console(highlight=False)):
            raise typer.Exit(1)


@app.command()
def verify(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPTS]", help="By default the demo's.")] = None,
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    page_size: PageSize = 16,
    dtype: Dtype = "float32",
) -> None:
    """Run prompts in twelve ways: cold, hot, batched, in chunks, forked, preempted. Compare all bits of the answers.

    The exit code is 1 where one way gives another answer than the first.
    """
    with plain_errors():
        from .demo import few_shot_prompts
        from .verify import Job, verify as ways

        with open_engine(model, dtype=dtype, page_size=page_size, kv_memory="512MiB") as engine:
            tokenizer = engine.tokenizer
        note(f"exact: {engine.model.describe().get('exact', 'not known')}")
        assert tokenizer is not None, "models that are loaded come with their tokenizer"
        ids = [tokenizer.encode(prompt) for prompt in prompts] if prompts else few_shot_prompts(tokenizer)[:4]
        job = Job(model=engine.model, tokenizer=tokenizer, prompts=ids, max_tokens=max_tokens, page_size=page_size)
        tried = []
        for verdict in ways(job):
            if verdict.tried:
                tried.append(verdict)
                typer.echo(f"{'same  ' if verdict.difference is None else 'OTHER '} {verdict.name}")
            else:
                typer.echo(f"-      {verdict.name}: not tried, longer answers would need it")
        different = [verdict for verdict in tried if verdict.difference is not None]
        typer.echo(f"identical: {len(tried) - len(different)} of {len(tried)} ways")
        if different:
            typer.echo(f"first difference: {different[0].name}: {different[0].difference}")
            raise typer.Exit(1)


@app.command()
def info(
    model: Model = "smollm2-135m", page_size: PageSize = 16, kv_memory: KVMemory = "512MiB", dtype: Dtype = "float32"
) -> None:
    """Show versions, the machine, the model, KV geometry and which attention runs."""
    with plain_errors():
        from .info import facts

        with open_engine(model, dtype=dtype, page_size=page_size, kv_memory=kv_memory) as engine:
            width = get_terminal_size().columns
            for name, value in facts(engine):
                typer.echo(fill(f"{name:<17}{value}", width, subsequent_indent=" " * 17))


@app.command()
def plan(
    lengths: Annotated[
        Path | None, typer.Option(help="CSV file of prompt and output lengths, or lines of PROMPT,OUTPUT.")
    ] = None,
    prompt: Annotated[float | None, typer.Option(help="Instead of a file: tokens of every prompt.")] = None,
    output: Annotated[float | None, typer.Option(help="And of every output.")] = None,
    shared_prefix: Annotated[int, typer.Option(help="Tokens before every prompt, the same in all.")] = 0,
    max_len: Annotated[
        int | None, typer.Option(help="Longest request, prompt and output.", show_default="the model's context")
    ] = None,
    kv_memory: Annotated[str, typer.Option("--memory", "--kv-memory", help="Size of the KV pool.")] = "512MiB",
    page_size: PageSize = 16,
    dtype: Dtype = "float32",
    model: Annotated[str, typer.Option(help="Name, directory or hub id; its config is read.")] = "smollm2-135m",
    num_layers: Annotated[int | None, typer.Option("--layers", help="Instead of a model: its layers.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Heads with keys of their own.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Width of one head.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this .png or .svg (needs matplotlib).")] = None,
) -> None:
    """Say how many requests a KV pool runs at once: reserved at full length, in powers of two, in pages, shared.

    Figures are averages over time of a pool that always has requests waiting.
    """
    with plain_errors():
        given = dict(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        numbers = {name: value for name, value in given.items() if value is not None}
        if 0 < len(numbers) < len(given):
            fail("geometry: --layers, --kv-heads and --head-dim go together; give all three or a --model")
        alike = (prompt, output) if prompt is not None and output is not None else None
        if (lengths is None) == (alike is None) or (prompt is None) != (output is None):
            fail("lengths: give either --lengths FILE or both --prompt and --output")
        from radixrt.runtime import KVGeometry

        from .planner import plan as plan_capacity

        made = plan_capacity(
            KVGeometry(**numbers) if numbers else model,
            lengths=lengths or alike or (),
            kv_memory=kv_memory,
            dtype=dtype,
            page_size=page_size,
            max_len=max_len,
            shared_prefix=shared_prefix,
        )
        typer.echo(str(made))
        if plot is not None:
            made.plot(plot)
            note(f"drawn into {plot}")


@app.command()
def replay(
    record: Annotated[Path, typer.Argument(metavar="FILE", help="What --record or Engine(record=) wrote.")],
) -> None:
    """Run a record again, checking everything after each line, up to the first difference (exit code 1)."""
    with plain_errors():
        from radixrt.runtime import replay as rerun

        done = rerun(record)
        verdict = "identical" if done.difference is None else done.difference
        typer.echo(f"{done.num_lines} lines, {done.num_steps} steps: {verdict}")
        if done.difference is not None:
            raise typer.Exit(1)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What a program's `trace` option wrote.")],
) -> None:
    """Show the runs of a trace: their branches, and what of each prompt was cached and what was computed."""
    with plain_errors():
        from .trace import load_trace
        from .trace_view import TraceView

        Console(highlight=False).print(TraceView(load_trace(file)))


def main() -> None:
    """The entry point. Sets what has to be set before torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle OpenMP threads sleep instead of spinning
    app()


def _prompt_text(prompt: str) -> str:
    """The argument, or stdin where it is `-`, without its last line break."""
    if prompt != "-":
        text = prompt
    elif sys.stdin is None or sys.stdin.isatty():
        fail("prompt: none given; give one as an argument or on stdin")
    else:
        try:
            text = typer.get_binary_stream("stdin").read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            fail(f"prompt: stdin is not UTF-8 text: {error}")
    if not text.strip():
        fail(f"prompt: {'stdin is empty' if prompt == '-' else 'empty'}; at least one word is needed")
    return text


def _usage(output: Output, seconds: float) -> str:
    usage, choice = output.usage, output.choices[0]
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached, {usage.computed_tokens} computed), "
        f"{usage.completion_tokens} generated, {choice.finish_reason}, {seconds:.1f} s"
    )


def _explanation(engine: Engine, ids: list[int]) -> str:
    """What the cache has of these tokens, and why not of the rest, in one line."""
    found = engine.explain(ids)
    line = f"{found.matched} of {len(ids)} tokens are cached"
    if found.diverged_at is not None:
        line += f"; from token {found.diverged_at} on {found.diverged_from or 'another'} goes on differently"
    if found.evicted_by is not None:
        line += f"; the rest was evicted by {found.evicted_by}"
    return line
