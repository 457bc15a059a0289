"""What programs computed beside the least that they could have: every given token of their common tree once.

Knows nothing of states or text: it watches what an engine is asked.
"""

from __future__ import annotations

from collections import Counter

from radixrt.runtime import CacheUse, Choice, Engine, Event, FinishEvent, Handle, SamplingParams, checks

from .backend import Asked, EngineBackend


class Yardstick:
    """Takes the place of an engine in `run`, `batch` or `session`, and counts; as text, one line to print.

    Less than the `ideal` is computed ("<=") where the cache had some of it before, or what was asked was cancelled.

    `ideal` is the number of nodes in the token trie of all that was given: prompts, appended text, templates, options.
    What was generated does not count while anybody has it, even if somebody else gives it; but for the end of a
    generation, which was not fed: its last token, or all from the last that its grammar left a choice of. It takes
    memory in the tokens of all requests: for looking, not for serving.
    """

    def __init__(self, engine: Engine) -> None:
        """InvalidRequest for anything but an engine of this process."""
        checks.instance("yardstick", engine, Engine, "an rx.Engine; other backends do not say what they computed")
        self._backend = backend = EngineBackend(engine)
        self._engine = engine
        self._before = engine.stats().counters
        self._nodes: dict[tuple[int | str, int], int] = {}  # by parent, or namespace at a root, and token
        self._given: set[int] = set()
        self._fed: set[int] = set()  # of those that were generated too
        self._paths: dict[Handle, list[int]] = {}  # the nodes of each request's tokens
        self._num_paths: Counter[int] = Counter()  # by node
        self._roots: dict[Handle, str] = {}
        self.tokenizer, self.vocab_size = backend.tokenizer, backend.vocab_size
        self.eos_token_ids = backend.eos_token_ids
        self.abort, self.pin, self.unpin, self.explain = backend.abort, backend.pin, backend.unpin, backend.explain
        self.begin_anew = backend.begin_anew

    @property
    def ideal(self) -> int:
        """The least number of rows that computes everything given."""
        return len(self._given)

    @property
    def computed(self) -> int:
        """Rows of given tokens that the engine has run since this was made, whoever asked for them."""
        return self._engine.stats().counters.computed - self._before.computed

    @property
    def shared(self) -> int:
        """Tokens that needed no row of their own."""
        return self._engine.stats().counters.cached - self._before.cached

    def __str__(self) -> str:
        sign = "==" if self.computed == self.ideal else "<=" if self.computed < self.ideal else "!="
        return f"computed {self.computed:,} {sign} ideal {self.ideal:,}; {self.shared:,} tokens shared"

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int, cache: CacheUse) -> Handle:
        handle = self._backend.submit(tokens, params, namespace, priority=priority, cache=cache)
        self._begin(handle, [], tokens, namespace)
        return handle

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        children = self._backend.fork(handle, n, params, text=text, at=at)
        for child in children:
            self._begin(child, self._paths[handle][:at], text or [], self._roots[handle])
        return children

    def release(self, handle: Handle) -> None:
        self._backend.release(handle)
        path = self._paths.pop(handle, [])
        self._num_paths.subtract(path)
        self._fed.difference_update(node for node in path if not self._num_paths[node])
        self._roots.pop(handle, None)

    def step(self) -> list[Event]:
        events = self._backend.step()
        for event in events:
            if isinstance(event, FinishEvent) and event.handle in self._paths:
                [choice] = event.output.choices
                generated = self._extend(event.handle, choice.token_ids)
                if choice.finish_reason != "abort":
                    self._fed.update(generated[: _num_fed(choice)])
        return events

    @property
    def is_idle(self) -> bool:
        return self._backend.is_idle

    def _begin(self, handle: Handle, path: list[int], tokens: list[int], root: str) -> None:
        self._paths[handle], self._roots[handle] = path, root
        self._num_paths.update(path)
        self._given.update(node for node in self._extend(handle, tokens) if node not in self._fed)

    def _extend(self, handle: Handle, tokens: list[int] | tuple[int, ...]) -> list[int]:
        """Walk on from the end of a request's path; the nodes come to."""
        path, begin = self._paths[handle], len(self._paths[handle])
        for token_id in tokens:
            key = (path[-1] if path else self._roots[handle], token_id)
            path.append(self._nodes.setdefault(key, len(self._nodes)))
        self._num_paths.update(path[begin:])
        return path[begin:]


def _num_fed(choice: Choice) -> int:
    """How many of its tokens a choice that has ended has fed: those before the last whose logits it needed."""
    skips = set(choice.forced) if choice.logprobs is None else set()
    return max((at for at in range(len(choice.token_ids)) if at not in skips), default=0)
