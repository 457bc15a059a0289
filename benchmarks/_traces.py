"""Real queues of requests as token ids: two few-shot queues, a chat service's trace and coding agents' sessions.

Knows nothing of caches. Where a trace names blocks instead of text, a block is one token id that stands for many.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.radix import IntArray

DATA = Path(__file__).parent / "data"
_TOKEN = re.compile(r"\w{1,5}|[^\w\s]|\s+")  # about 4 characters a token


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: its ids, and how many tokens it has (more than ids where these stand for blocks)."""

    tokens: IntArray
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in order, and how a cache should page them: each page is a block of `block_len` tokens."""

    name: str
    requests: list[Request]
    page_size: int
    block_len: int

    @cached_property
    def paths(self) -> list[list[int]]:
        """Of each request the nodes of the trie of all blocks, numbered from 0; the last block may be partly filled."""
        numbers: dict[tuple[int, bytes], int] = {}
        paths = []
        for request in self.requests:
            node, path, raw = -1, [], request.tokens.tobytes()
            for start in range(0, len(raw), 4 * self.page_size):
                node = numbers.setdefault((node, raw[start : start + 4 * self.page_size]), len(numbers))
                path.append(node)
            paths.append(path)
        return paths

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_blocks(self) -> int:
        """Different blocks of the whole trace: pages that hold everything."""
        return 1 + max(map(max, self.paths))

    def head(self, num_requests: int) -> Trace:
        """The first requests as a trace of their own."""
        return Trace(
            name=self.name, requests=self.requests[:num_requests], page_size=self.page_size, block_len=self.block_len
        )


def conversation() -> Trace:
    """The conversation trace of Mooncake: 12,031 requests to a chat service within an hour, blocks of 512 tokens."""
    requests = []
    with lzma.open(DATA / "mooncake" / "conversation.jsonl.xz", "rt") as lines:
        for num_tokens, runs in map(json.loads, lines):
            requests.append(Request(_expand(runs), num_tokens))
    return Trace(name="conversation", requests=requests, page_size=1, block_len=512)


def agents() -> Trace:
    """60 sessions of coding agents that begin together, in order of time, blocks of 64 tokens; nothing between them."""
    timed: list[tuple[float, Request]] = []
    first_id = 0
    with lzma.open(DATA / "agent_sessions" / "sessions.jsonl.xz", "rt") as lines:
        for session in map(json.loads, lines):
            rows = [(time, row, _expand(row["h"])) for time, row in _rows(session["requests"], 0.0)]
            timed += [(time, Request(ids + np.int32(first_id), row["in"])) for time, row, ids in rows if len(ids)]
            first_id += 1 + max(int(ids.max()) for _, _, ids in rows if len(ids))
    timed.sort(key=lambda pair: pair[0])  # stable: equal times stay in the order of the file
    return Trace(name="agent sessions", requests=[request for _, request in timed], page_size=1, block_len=64)


def bbh() -> Trace:
    """BIG-Bench Hard: the questions of 13 tasks behind their chain-of-thought prompts, in random order."""
    prompts = []
    with tarfile.open(DATA / "bbh" / "bbh.tar.xz") as archive:
        texts = {name: _read(archive, name) for name in archive.getnames() if name.endswith((".json", ".txt"))}
    for name in sorted(name for name in texts if name.endswith(".txt")):
        task = Path(name).stem
        shots = texts[name].partition("\n-----\n")[2]
        examples = json.loads(texts[f"bbh/{task}.json"])["examples"]
        prompts += [f"{shots}\n\nQ: {example['input']}\nA: Let's think step by step.\n" for example in examples]
    random.Random(3).shuffle(prompts)
    return _of_text("bbh", prompts)


def gsm8k() -> Trace:
    """GSM8K: each test question behind one of 50 prompts of 8 worked examples."""
    data = json.loads(lzma.decompress((DATA / "gsm8k" / "queue.json.xz").read_bytes()))
    shots = [f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in data["shots"]]
    prompts = ["".join(shots[start:stop]) for start, stop in pairwise(range(0, len(shots) + 1, 8))]
    choice = random.Random(5)
    return _of_text("gsm8k", [f"{choice.choice(prompts)}Question: {q}\nAnswer:" for q in data["questions"]])


def _of_text(name: str, prompts: list[str]) -> Trace:
    numbers: dict[str, int] = {}
    requests = []
    for prompt in prompts:
        words = _TOKEN.findall(prompt)
        tokens = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int32, len(words))
        requests.append(Request(tokens, len(tokens)))
    return Trace(name=name, requests=requests, page_size=16, block_len=16)


def _expand(runs: list[list[int]]) -> IntArray:
    """Runs `[first id, count]` as ids."""
    return np.fromiter(chain.from_iterable(range(first, first + count) for first, count in runs), np.int32)


def _rows(requests: list[dict[str, Any]], start: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Requests with their times, those of nested groups included, whose clock starts when the group does."""
    for row in requests:
        if "requests" in row:
            yield from _rows(row["requests"], start + row["t"])
        else:
            yield start + row["t"], row


def _read(archive: tarfile.TarFile, name: str) -> str:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file.read().decode()
