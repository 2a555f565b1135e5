"""Counter-based sampling: the token at a position depends on (logits, seed, position), not on who draws it.

Gumbel-max (Gumbel 1954; Maddison et al. 2014): argmax(logits / temperature + g) with g standard Gumbel noise is a
sample of softmax(logits / temperature). The noise of a token is a function of (seed, position, token), see `_noise`.
Decisions are made in float64, one row at a time in effect, so that neither the order nor the size of a batch can change
one through rounding.

`choose` is quick because almost no token can win. Bits are cheap and logarithms are not, so noise is worked out only
for tokens whose bits promise much of it, and for tokens whose logits can make up for having little. That leaves the
same winner as noise over the whole vocabulary: `choose` decides exactly like `choose_plainly`, which is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from belayer.engine import _sampler_on_device
from belayer.engine._noise import Bits, Floats, bits, gumbel
from belayer.engine._penalties import Penalties
from belayer.engine.request import Sampling

Row = tuple[int, Sampling, int]
"""Row of the logits, how to sample it, position in the completion."""

Logits = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Tokens = npt.NDArray[np.intp]

RARE = np.uint32(1 << 26)  # one token in 64 has bits below this, and with them noise above `LITTLE`
LITTLE = float(gumbel(np.array([RARE]))[0])
FEW = 4096
AT_ONCE = 1 << 18  # logits worked on together: more would not stay in the cache
SHELVES, SHELVES_PER_NAT = 2048, 64.0  # of the nucleus: the last one holds all that is e^-32 times the likeliest


def choose(logits: torch.Tensor, rows: Sequence[Row], penalties: Mapping[int, Penalties] | None = None) -> list[int]:
    """One token for each of `rows`. `logits` is [batch, vocabulary]; temperature 0 is greedy.

    `penalties` holds, by row of the logits, the tokens so far of those requests that have a penalty.
    """
    if logits.device.type != "cpu":
        return _sampler_on_device.choose(logits, rows, penalties or {})
    matrix = _host(logits)
    columns = matrix.shape[1]
    tokens = [0] * len(rows)
    whole: list[int] = []  # drawn from the whole vocabulary
    partly: list[tuple[int, Logits, Tokens]] = []  # drawn from what filters leave
    for index, (row, sampling, position) in enumerate(rows):
        one: Logits = matrix[row]
        penalty = penalties.get(row) if penalties else None
        if penalty is not None:
            one = one.astype(np.float64)
            penalty.apply(one)
        if held := sampling.held_back(position):
            one = _without(one, held)
        filters = sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1
        if sampling.temperature == 0 or (filters and not math.isfinite(one.max())):
            tokens[index] = int(one.argmax())  # the likeliest; or the first that is no number: its logprob tells
        elif filters:
            kept = candidates(one, sampling)
            partly.append((index, one[kept], kept))
        elif penalty is None and not held:
            whole.append(index)
        else:
            partly.append((index, one, np.arange(columns)))
    step = max(1, AT_ONCE // columns)
    for start in range(0, len(whole), step):
        group = whole[start : start + step]
        drawn = bits([(rows[i][1].seed, rows[i][2]) for i in group], columns)
        temperatures = np.array([rows[i][1].temperature for i in group], dtype=np.float64)
        for index, token in zip(group, winners(matrix[[rows[i][0] for i in group]], drawn, temperatures), strict=True):
            tokens[index] = int(token)
    for index, values, kept in partly:
        _, sampling, position = rows[index]
        drawn = bits([(sampling.seed, position)], columns)[0, kept]
        if len(kept) < FEW:
            tokens[index] = int(kept[(values / np.float64(sampling.temperature) + gumbel(drawn)).argmax()])
        else:
            tokens[index] = int(kept[winners(values[None], drawn[None], np.array([float(sampling.temperature)]))[0]])
    return tokens


def winners(logits: Logits, drawn: Bits, temperatures: Floats) -> Tokens:
    """The column of each row at which logits / temperature + noise is largest; the first of equals.

    `logits` and `drawn` are [rows, columns], `temperatures` is [rows]. Every token whose noise exceeds `LITTLE` is
    looked at; the best of them and the likeliest token set a mark, and of the other tokens only those are looked at
    whose logits reach that mark with as much noise as they can have at most.
    """
    count, columns = logits.shape
    flat_logits, flat_drawn = logits.reshape(-1), drawn.reshape(-1)
    best = np.full(count, -np.inf)

    def look_at(places: Tokens) -> tuple[Tokens, Floats]:
        of = places // columns
        scores = flat_logits[places] / temperatures[of] + gumbel(flat_drawn[places])
        with np.errstate(invalid="ignore"):  # logits that are not numbers: their logprob tells
            np.maximum.at(best, of, scores)
        return of, scores

    likeliest = logits.argmax(axis=1) + columns * np.arange(count)
    noisy = np.concatenate([np.flatnonzero(flat_drawn < RARE), likeliest])
    noisy_rows, noisy_scores = look_at(noisy)
    # Rounding must not lose the winner: the mark is lowered by more than all errors below can add up to.
    mark = (best - LITTLE - 1e-9 * (np.abs(best) + LITTLE)) * temperatures
    mark = np.nextafter(mark.astype(logits.dtype), logits.dtype.type(-np.inf))
    strong = np.flatnonzero(logits > mark[:, None])
    strong_rows, strong_scores = look_at(strong)
    result = np.full(count, columns, dtype=np.intp)
    for places, of, scores in ((noisy, noisy_rows, noisy_scores), (strong, strong_rows, strong_scores)):
        hits = scores == best[of]
        np.minimum.at(result, of[hits], places[hits] % columns)
    return np.where(result < columns, result, likeliest % columns)  # nothing wins among logits that are not numbers


def candidates(logits: Logits, sampling: Sampling) -> Tokens:
    """Tokens that min-p, top-k and top-p leave of one row of logits, in rising order; never none.

    Tokens as good as the last one that top-k lets in are let in too. Top-p keeps the tokens before which, in the order
    of falling probability, less than `top_p` of what min-p and top-k left has been collected; of equals the smaller
    token comes first.
    """
    kept = None
    values = logits
    if sampling.min_p > 0:
        floor = float(logits.max()) + sampling.temperature * float(np.log(sampling.min_p))
        kept = np.flatnonzero(logits >= floor)
        values = logits[kept]
    if 0 < sampling.top_k < len(values):
        kth = len(values) - sampling.top_k
        inside = np.flatnonzero(values >= np.partition(values, kth)[kth])
        kept = inside if kept is None else kept[inside]
        values = logits[kept]
    if sampling.top_p < 1:
        inside = _nucleus(values, sampling)
        kept = inside if kept is None else kept[inside]
    return np.arange(len(logits)) if kept is None else kept


def _nucleus(logits: Logits, sampling: Sampling) -> Tokens:
    falls = logits.astype(np.float64)
    np.subtract(falls.max(), falls, out=falls)
    falls /= sampling.temperature
    weights = np.exp(-falls)
    wanted = sampling.top_p * weights.sum()
    # Sorting everything would take longer than all the rest: shelve by probability, find the shelf on which `wanted`
    # is reached, and sort only that one.
    shelves = np.minimum(falls * SHELVES_PER_NAT, SHELVES - 1).astype(np.int32)
    filled = np.cumsum(np.bincount(shelves, weights, SHELVES))
    last = min(int(np.searchsorted(filled, wanted)), SHELVES - 1)
    sure = shelves < last
    order = np.flatnonzero(shelves == last)
    order = order[np.argsort(falls[order], kind="stable")]
    collected = np.cumsum(weights[order]) + (filled[last - 1] if last else 0.0)
    before = np.concatenate([[filled[last - 1] if last else 0.0], collected[:-1]])
    sure[order[before < wanted]] = True
    return np.flatnonzero(sure)


def _without(logits: Logits, held: Sequence[int]) -> Logits:
    """One row of logits in which no token of `held` can win; ids beyond the vocabulary are nobody's."""
    changed = logits.copy()
    changed[[token for token in held if token < len(logits)]] = -np.inf
    return changed


def likeliest(logits: torch.Tensor) -> Tokens:
    """The likeliest token of each row of [batch, vocabulary], the first of equals."""
    return _host(logits).argmax(axis=1)


def logprobs_of(logits: torch.Tensor, tokens: Tokens) -> npt.NDArray[np.float32]:
    """Natural logarithm of the probability of one token in each row of [batch, vocabulary].

    Row by row, so that it cannot depend on the batch. It is NaN where a logit of the row is not a number.
    """
    matrix = _host(logits)
    found = np.empty(len(matrix), dtype=np.float32)
    work = np.empty_like(matrix[0]) if len(matrix) else matrix
    with np.errstate(invalid="ignore"):
        for index, (row, token) in enumerate(zip(matrix, tokens, strict=True)):
            largest = row.max()
            np.subtract(row, largest, out=work)
            np.exp(work, out=work)
            found[index] = float(row[token]) - float(largest) - math.log(work.sum())
    return found


def choose_plainly(logits: torch.Tensor, row: Row, penalties: Penalties | None = None) -> int:
    """What `choose` decides, one row, written down as directly as possible: noise for every token, then the filters."""
    index, sampling, position = row
    scores = _host(logits)[index].astype(np.float64)
    if penalties is not None:
        penalties.apply(scores)
    scores = _without(scores, sampling.held_back(position))
    if sampling.temperature > 0:
        allowed = candidates(scores, sampling)
        noise = gumbel(bits([(sampling.seed, position)], len(scores)))[0]
        outside = np.full(len(scores), -np.inf)
        outside[allowed] = 0
        scores = scores / sampling.temperature + noise + outside
    return int(scores.argmax())


def _host(logits: torch.Tensor) -> Logits:
    # NumPy rather than torch: one thread, and no waiting for a second one that another process keeps from running
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits.detach().cpu().numpy()
