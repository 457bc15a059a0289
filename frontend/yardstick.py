"""What programs computed beside the least that they could have: every given token of their common tree once.

Knows nothing of states or text: it watches what an engine is asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import compress, count

from radixrt.runtime import Choice, Engine, Event, FinishEvent, Handle, SamplingParams, checks

from .backend import Asked, EngineBackend


class Yardstick:
    """Takes the place of an engine in `run`, `batch` or `session`, and counts; as text, one line to print.

    Less than the `ideal` is computed ("<=") where the cache had some of it: from before, or in a page that stayed for
    its beginning; and where what was asked was cancelled.

    `ideal` is the number of nodes in the token trie of all that was given: prompts, appended text, templates, options.
    What was generated does not count, even if somebody else gives it; but for the end of a generation, which was not
    fed: its last token, or all from the last that its grammar left a choice of. Once nobody has what was generated any
    more, it is gone with what came behind it, and counts where it is given anew.

    Takes memory in the tokens of all requests: for looking, not for serving.
    """

    def __init__(self, engine: Engine) -> None:
        """InvalidRequest for anything but an engine of this process."""
        checks.instance("yardstick", engine, Engine, "an rx.Engine; other backends do not say what they computed")
        self._backend = backend = EngineBackend(engine)
        self._engine = engine
        self._before = engine.stats().counters
        self._children: defaultdict[int | str, dict[int, int]] = defaultdict(dict)  # nodes by parent or root, and token
        self._new_nodes = count()
        self._there: set[int] = set()  # nodes that need not be computed again
        self._paths: dict[Handle, list[int]] = {}  # the nodes of each request's tokens
        self._generated: dict[Handle, list[bool]] = {}  # which of them are
        self._num_paths: Counter[int] = Counter()  # by node
        self._roots: dict[Handle, str] = {}
        self.ideal = 0
        """The least number of rows that computes everything given."""
        self.tokenizer, self.vocab_size = backend.tokenizer, backend.vocab_size
        self.eos_token_ids = backend.eos_token_ids
        self.abort, self.pin, self.unpin, self.explain = backend.abort, backend.pin, backend.unpin, backend.explain
        self.begin_anew = backend.begin_anew

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

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        handle = self._backend.submit(tokens, params, namespace, priority=priority)
        self._begin(handle, [], [], tokens, namespace)
        return handle

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        children = self._backend.fork(handle, n, params, text=text, at=at)
        for child in children:
            path, generated = self._paths[handle][:at], self._generated[handle][:at]
            self._begin(child, path, generated, text or [], self._roots[handle])
        return children

    def release(self, handle: Handle) -> None:
        self._backend.release(handle)
        if handle in self._paths:
            self._end(self._paths.pop(handle), self._generated.pop(handle))
            del self._roots[handle]

    def step(self) -> list[Event]:
        events = self._backend.step()
        for event in events:
            if isinstance(event, FinishEvent) and event.handle in self._paths:
                [choice] = event.output.choices
                begin = len(self._paths[event.handle])
                self._extend(event.handle, choice.token_ids, generated=True)
                if choice.finish_reason in ("stop", "length"):
                    self._there.update(self._paths[event.handle][: begin + _num_fed(choice)])
        return events

    @property
    def is_idle(self) -> bool:
        return self._backend.is_idle

    def _begin(self, handle: Handle, path: list[int], generated: list[bool], tokens: list[int], root: str) -> None:
        """A request that has the nodes of another, and is given these tokens behind them."""
        self._paths[handle], self._generated[handle], self._roots[handle] = path, generated, root
        self._num_paths.update(path)
        given = set(self._extend(handle, tokens, generated=False)) - self._there
        self.ideal += len(given)
        self._there |= given

    def _extend(self, handle: Handle, tokens: Iterable[int], *, generated: bool) -> list[int]:
        """Walk on from the end of a request's path; the nodes come to."""
        path, begin = self._paths[handle], len(self._paths[handle])
        for token_id in tokens:
            siblings = self._children[path[-1] if path else self._roots[handle]]
            if token_id not in siblings:
                siblings[token_id] = next(self._new_nodes)
            path.append(siblings[token_id])
        self._generated[handle] += [generated] * (len(path) - begin)
        self._num_paths.update(path[begin:])
        return path[begin:]

    def _end(self, path: list[int], generated: list[bool]) -> None:
        """What was generated for this request, and nobody else has, is gone with all that comes behind it."""
        self._num_paths.subtract(path)
        gone = [node for node in compress(path, generated) if not self._num_paths[node]][:1]
        while gone:
            node = gone.pop()
            self._there.discard(node)
            gone += self._children.pop(node, {}).values()


def _num_fed(choice: Choice) -> int:
    """How many of its tokens a choice that has ended has fed: those before the last whose logits it needed."""
    skips = set(choice.forced) if choice.logprobs is None else set()
    return max((at for at in range(len(choice.token_ids)) if at not in skips), default=-1)
