"""Continuous load for the engine fault campaign, every token of which is checked.

A fixed set of requests is answered once, undisturbed, under each of two sets of weights: the references. Then they
are asked again and again, in random company, while things go wrong. A completion whose tokens carry one policy version
must be the reference of those weights, tokens and logprobs, to the bit. Where weights changed on the way, the first
part must be the beginning of a reference, and each later part must be what the engine says when it is given the tokens
before that part and those weights.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk
from belayer.errors import EngineError

MAX_TOKENS = 32


class Answer(msgspec.Struct):
    """One completion as it was delivered."""

    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []


class _Part(msgspec.Struct, frozen=True):
    """Tokens `start` to `end` of a completion, made by weights that came in the middle of it; `last`: it ends there."""

    request: GenerationRequest
    answer: Answer
    start: int
    end: int
    last: bool
    weights: int


def pool(vocabulary: int, seed: int) -> list[GenerationRequest]:
    """Greedy and sampled requests with prompts of 6 to 180 tokens; some end at a stop token, some share a prefix."""
    rng = random.Random(f"load {seed}")
    shared = [rng.randrange(vocabulary) for _ in range(64)]
    requests = []
    for index in range(14):
        length = rng.choice((6, 17, 40, 90, 180))
        prompt = [rng.randrange(vocabulary) for _ in range(length)]
        sampling = [
            Sampling(max_tokens=MAX_TOKENS, temperature=0.0),
            Sampling(max_tokens=MAX_TOKENS, seed=rng.getrandbits(60)),
            Sampling(max_tokens=MAX_TOKENS, seed=rng.getrandbits(60), temperature=0.7, top_k=20, top_p=0.9),
            Sampling(max_tokens=MAX_TOKENS, seed=rng.getrandbits(60), temperature=1.4, min_p=0.02),
            Sampling(max_tokens=MAX_TOKENS, seed=rng.getrandbits(60), stop_token_ids=tuple(range(0, vocabulary, 40))),
        ][index % 5]
        requests.append(
            GenerationRequest(
                id=f"p{index}", prompt_ids=(shared + prompt) if index % 3 == 0 else prompt, sampling=sampling
            )
        )
    return requests


async def complete(engine: Engine, request: GenerationRequest) -> Answer:
    """One answer, with the resumed tokens, if any, left out."""
    answer = Answer()

    def sink(chunk: TokenChunk) -> None:
        answer.tokens += chunk.token_ids
        answer.logprobs += chunk.logprobs
        answer.versions += [chunk.weights_version] * len(chunk.token_ids)

    await engine.generate(request, sink)
    return answer


class Load:
    """`slots` tasks that each keep one request in flight."""

    def __init__(self, engine: Engine, requests: list[GenerationRequest], *, slots: int, seed: int) -> None:
        self._engine = engine
        self._requests = requests
        self._slots = slots
        self._rng = random.Random(f"picks {seed}")
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._parts: deque[_Part] = deque()
        self._begun: dict[str, float] = {}  # request in flight: when it began
        self._changed = asyncio.Condition()
        self._stopping = False
        self.references: dict[tuple[int, int], Answer] = {}  # (weights, number of the request)
        self.weights_of: Callable[[int], int] = lambda version: version % 2
        self.found: Counter[str] = Counter()  # what went wrong
        self.details: list[str] = []
        self.completed = 0
        self.tokens = 0
        self.parts_checked = 0

    async def learn(self, weights: int) -> None:
        """Make the references of the weights now in force; nothing else may run."""
        answers = await asyncio.gather(*(complete(self._engine, request) for request in self._requests))
        for number, answer in enumerate(answers):
            self.references[weights, number] = answer

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._slot()) for _ in range(self._slots)]

    async def stop(self, timeout_s: float) -> None:
        """Let everything in flight end. What does not end in time hangs."""
        self._stopping = True
        if self._tasks:
            done, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in done:
                task.result()  # a defect of this module comes out
            if pending:
                self._note("hung", f"{len(pending)} requests did not end within {timeout_s:g} s", len(pending))
            self.cancel()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def check_rest(self) -> int:
        """Check the parts whose weights are in force, one after the other; how many wait for other weights."""
        while (part := self._due_part()) is not None:
            await self._check_part(part)
        return len(self._parts)

    @property
    def in_flight(self) -> set[str]:
        return set(self._begun)

    async def ended(self, keys: set[str], timeout_s: float) -> bool:
        """Wait until these requests have all ended; False and counted as hung: they have not."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not keys & self._begun.keys())
        except TimeoutError:
            late = keys & self._begun.keys()
            self._note("hung", f"{len(late)} requests did not end within {timeout_s:g} s", len(late))
            return False
        return True

    async def _slot(self) -> None:
        while not self._stopping:
            await self._one()

    async def _one(self) -> None:
        if (part := self._due_part()) is not None:
            await self._check_part(part)
            return
        number = self._rng.randrange(len(self._requests))
        request = msgspec.structs.replace(self._requests[number], id=f"{number}-{next(self._numbers)}")
        answer = await self._ask(request)
        if answer is not None:
            self._check(number, answer)

    async def _ask(self, request: GenerationRequest) -> Answer | None:
        self._begun[request.id] = time.monotonic()
        try:
            answer = await complete(self._engine, request)
        except EngineError as error:
            self._note("failed", f"{request.id}: {error}")
            await asyncio.sleep(0.2)  # an engine that has given up would be asked without a pause
            return None
        finally:
            del self._begun[request.id]
            async with self._changed:
                self._changed.notify_all()
        self.completed += 1
        self.tokens += len(answer.tokens)
        return answer

    # -- checking -----------------------------------------------------------------------------------------------------
    def _check(self, number: int, answer: Answer) -> None:
        groups = [(key, len(list(run))) for key, run in itertools.groupby(answer.versions)]
        if [key for key, _ in groups] != sorted(key for key, _ in groups):
            self._note("changed", f"request {number} went back to older weights: {groups}")
            return
        start = 0
        for position, (version, length) in enumerate(groups):
            weights = self.weights_of(version)
            if position == 0:
                reference = self.references[weights, number]
                whole = len(groups) == 1
                self._compare(f"request {number}", reference, answer, length, whole=whole)
            else:
                last = position == len(groups) - 1
                self._parts.append(_Part(self._requests[number], answer, start, start + length, last, weights))
            start += length

    def _compare(self, what: str, wanted: Answer, got: Answer, length: int, *, whole: bool) -> None:
        """The first `length` tokens of `got`; `whole`: there are to be no others."""
        if whole and len(got.tokens) != len(wanted.tokens):
            missing = len(wanted.tokens) - len(got.tokens)
            kind = "lost" if missing > 0 else "duplicated"
            self._note(kind, f"{what}: {len(got.tokens)} tokens instead of {len(wanted.tokens)}", abs(missing))
        pairs = list(zip(wanted.tokens, got.tokens[:length], strict=False))
        if changed := sum(a != b for a, b in pairs):
            first = next(i for i, (a, b) in enumerate(pairs) if a != b)
            self._note("changed", f"{what}: {changed} of {length} tokens differ, the first at {first}", changed)
        logprobs = sum(a != b for a, b in zip(wanted.logprobs, got.logprobs[:length], strict=False))
        if logprobs:
            self._note("logprobs_changed", f"{what}: {logprobs} of {length} logprobs differ", logprobs)

    def _due_part(self) -> _Part | None:
        """A part whose weights are in force; it may change on the way, and then the part is put back."""
        current = self.weights_of(self._engine.policy_version)
        for _ in range(len(self._parts)):
            part = self._parts.popleft()
            if part.weights == current:
                return part
            self._parts.append(part)
        return None

    async def _check_part(self, part: _Part) -> None:
        sampling = part.request.sampling
        if not part.last:
            sampling = msgspec.structs.replace(sampling, max_tokens=part.end)
        before = part.answer.tokens[: part.start]
        again = await self._ask(
            GenerationRequest(
                id=f"part-{next(self._numbers)}",
                prompt_ids=part.request.prompt_ids,
                sampling=sampling,
                resume_ids=before,
            )
        )
        if again is None:
            return  # counted as failed
        if {self.weights_of(version) for version in again.versions} != {part.weights}:
            self._parts.append(part)
            return
        self.parts_checked += 1
        delivered = Answer(part.answer.tokens[part.start : part.end], part.answer.logprobs[part.start : part.end], [])
        what = f"{part.request.id} from token {part.start} on, where its weights changed"
        self._compare(what, again, delivered, part.end - part.start, whole=part.last)

    def _note(self, kind: str, text: str, count: int = 1) -> None:
        self.found[kind] += count
        self.details.append(f"{kind}: {text}")
