"""How an id is chosen from logits, for one session: state by position, the same on hub and node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baru_common.errors import InvalidRequest
from baru_common.tokens import Vocabulary

from .filters import filtered_weights, penalised
from .guide import GuideCursor
from .noise import Stream, noise_key, race, race_scores
from .params import NO_ID, SamplingContext
from .sparse import MAX_SUPPORT, SparseProbs

_IMPOSSIBLE = float("-inf")


class Sampler:
    """Chooses ids for one session.

    `logits` are always rows of the model's own, [num_rows, vocabulary], in fp32, with nothing for what stands
    for no id; row r decides the id after `ids[: first + r]`. Of `ids` the first `num_committed` are committed:
    they begin with those of the call before. What follows them is draft and leaves no trace.
    """

    def __init__(self, context: SamplingContext, device: torch.device) -> None:
        self.context = context
        self._params = context.params
        self._device = device
        self._cursor: GuideCursor | None = context.guide.start() if context.guide else None
        size = context.vocabulary.size
        self._bias = self._dense(size, dict(self._params.biases)) if self._params.biases else None
        self._forbidden = self._forbidden_ids(size)
        self._stops = torch.tensor(sorted(context.stop_ids), dtype=torch.long, device=device)
        self._num_counted = 0
        self._counts = torch.zeros(size, device=device)
        self._in_prompt = torch.zeros(size, dtype=torch.bool, device=device)

    @property
    def is_plain(self) -> bool:
        """The choice is the likeliest id of the plain logits."""
        return self._params.is_greedy and not self._params.adjustments

    def choose(self, logits: torch.Tensor, ids: Sequence[int], first: int, num_committed: int) -> list[int]:
        """Return each row's id: the likeliest, or the one that the shared noise draws. `NO_ID` where none is left."""
        logits = self.adjusted(logits, ids, first, num_committed)
        possible = logits.amax(dim=1) > float("-inf")
        if self._params.is_greedy:
            chosen = lowest_argmax(logits)
        else:
            keys = [noise_key(self.context.seed, Stream.CHOICE, first + row) for row in range(len(logits))]
            chosen = race(self._weights(logits), keys)
        return [token if ok else NO_ID for token, ok in zip(chosen, possible.tolist(), strict=True)]

    def rank(self, logits: torch.Tensor, committed: Sequence[int], drafted: Sequence[int], num: int) -> list[int]:
        """Return the `num` ids that are likeliest to be chosen after `drafted`, the best guess of a drafter's own
        logits ([1, vocabulary]) first; fewer where fewer are possible."""
        ids = [*committed, *drafted]
        best = self.choose(logits, ids, len(ids), len(committed))
        if num == 1 or best == [NO_ID]:
            return [token for token in best if token != NO_ID]
        adjusted = self.adjusted(logits, ids, len(ids), len(committed))
        if not self._params.is_greedy:
            key = noise_key(self.context.seed, Stream.CHOICE, len(ids))
            adjusted = race_scores(self._weights(adjusted), [key])
        values, tokens = adjusted[0].topk(min(num, adjusted.shape[1]))
        possible = (token for token, value in zip(tokens.tolist(), values.tolist(), strict=True) if value > _IMPOSSIBLE)
        return [*best, *(token for token in possible if token != best[0])][:num]

    def probs(self, logits: torch.Tensor, ids: Sequence[int], first: int, num_committed: int) -> torch.Tensor:
        """Return each row's distribution, in double; a row of zeros where no id is left."""
        logits = self.adjusted(logits, ids, first, num_committed)
        if self._params.is_greedy:
            weights = torch.nn.functional.one_hot(torch.tensor(lowest_argmax(logits)), logits.shape[1])
            weights = weights.to(logits.device) * (logits > float("-inf"))
        else:
            weights = self._weights(logits) * (logits > float("-inf"))
        weights = weights.double()
        return weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.double).tiny)

    def draft(
        self, logits: torch.Tensor, ids: Sequence[int], num_committed: int, origin: int
    ) -> tuple[int, SparseProbs | None]:
        """Draw a draft id after `ids` from a drafter's own logits ([1, vocabulary]), for rejection sampling.

        Returns what it was drawn from, too; (NO_ID, None) when no id is left. `origin` is where the chain forked.
        """
        probs = self.probs(logits, ids, len(ids), num_committed)[0]
        values, tokens = probs.topk(min(MAX_SUPPORT, len(probs)))
        pairs = [(i, p) for i, p in zip(tokens.tolist(), values.tolist(), strict=True) if p > 0]
        if not pairs:
            return NO_ID, None
        sparse = SparseProbs.of(pairs)
        weights = torch.zeros(1, len(probs), dtype=torch.double)
        weights[0, list(sparse.ids)] = torch.tensor(sparse.probs, dtype=torch.double)
        return race(weights, [noise_key(self.context.seed, Stream.DRAFT, len(ids), origin)])[0], sparse

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        # NaN is the weight of logits that a penalty blew up to infinity, and of all in a row where no id is left.
        return filtered_weights(logits, self._params).nan_to_num(nan=1.0)

    # -- what is done to logits before anything is drawn

    def adjusted(self, logits: torch.Tensor, ids: Sequence[int], first: int, num_committed: int) -> torch.Tensor:
        """Return the rows after bias, penalties and all that may not come: -inf there."""
        if not self._params.adjustments:
            return logits
        if self._bias is not None:
            logits = logits + self._bias
        if self._penalises:
            counts = self._counts_before(ids, first, num_committed, len(logits))
            logits = penalised(logits, counts, self._in_prompt, self._params)
        if self._forbidden is not None:
            logits = logits.masked_fill(self._forbidden, float("-inf"))
        logits = self._with_positions(logits, first - self.context.num_prompt)
        return logits if self._cursor is None else self._guided(logits, self._cursor, ids, first, num_committed)

    @property
    def _penalises(self) -> bool:
        params = self._params
        return params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)

    def _counts_before(self, ids: Sequence[int], first: int, num_committed: int, num_rows: int) -> torch.Tensor:
        """Return how often each id is in the output before each row: [num_rows, vocabulary]."""
        num_prompt = self.context.num_prompt
        if not self._num_counted:
            self._in_prompt[list(ids[:num_prompt])] = True
            self._num_counted = num_prompt
        fresh = ids[self._num_counted : num_committed]
        self._count(self._counts, fresh)
        self._num_counted += len(fresh)
        counts = self._counts.repeat(num_rows, 1)
        self._count(counts[0], ids[num_committed:first])
        for row in range(1, num_rows):
            counts[row] = counts[row - 1]
            self._count(counts[row], ids[first + row - 1 : first + row])
        return counts

    def _count(self, counts: torch.Tensor, ids: Sequence[int]) -> None:
        if ids:
            index = torch.tensor(ids, device=self._device)
            counts.index_add_(0, index, torch.ones(len(ids), device=self._device))

    def _with_positions(self, logits: torch.Tensor, first_output: int) -> torch.Tensor:
        """Apply what holds for the first ids of the output only."""
        num_early = min(max(self._params.min_tokens - first_output, 0), len(logits))
        if num_early and len(self._stops):
            early = logits[:num_early].index_fill(1, self._stops, float("-inf"))
            logits = torch.cat((early, logits[num_early:]))
        forced = self._params.forced_ids[max(first_output, 0) :][: len(logits)]
        if forced:
            only = torch.full_like(logits[: len(forced)], float("-inf"))
            only[range(len(forced)), list(forced)] = 0.0
            logits = torch.cat((only, logits[len(forced) :]))
        return logits

    def _guided(
        self, logits: torch.Tensor, cursor: GuideCursor, ids: Sequence[int], first: int, num_committed: int
    ) -> torch.Tensor:
        """Mask what the grammar forbids. Rows after a draft id that it forbids do not count, and stay as they are."""
        output = list(ids[self.context.num_prompt : first])
        if not cursor.seek(output):
            if first > num_committed:
                return logits
            raise InvalidRequest("what is committed contradicts the grammar", details={"param": "grammar"})
        masks = cursor.masks(ids[first : first + len(logits) - 1])
        size = logits.shape[1]
        bits = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).reshape(len(masks), -1)
        allowed = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, :size].bool()
        masked = logits[: len(masks)].masked_fill(~allowed.to(logits.device), float("-inf"))
        return torch.cat((masked, logits[len(masks) :]))

    def _forbidden_ids(self, size: int) -> torch.Tensor | None:
        params = self._params
        if not (params.banned_ids or params.allowed_ids):
            return None
        forbidden = torch.full((size,), bool(params.allowed_ids), device=self._device)
        forbidden[list(params.allowed_ids)] = False
        forbidden[list(params.banned_ids)] = True
        return forbidden

    def _dense(self, size: int, values: dict[int, float]) -> torch.Tensor:
        dense = torch.zeros(size, device=self._device)
        dense[list(values)] = torch.tensor(list(values.values()), dtype=dense.dtype, device=self._device)
        return dense


def within(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return a model's rows ([num_rows, width]) without what the embedding was padded with, and -inf for holes:
    neither is ever chosen, or drafted."""
    logits = logits[:, : vocabulary.size]
    if not vocabulary.holes:
        return logits
    holes = torch.tensor(vocabulary.holes, device=logits.device)  # in no type that rounds ids
    return logits.index_fill(1, holes, float("-inf"))


def lowest_argmax(logits: torch.Tensor) -> list[int]:
    """Return the id of each row's maximum, the lowest of equals, on every device."""
    # Not argmax: which of several maxima it returns is documented, yet differs between kernels in the field.
    width = logits.shape[1]
    best = logits.amax(dim=1, keepdim=True)
    ids = torch.arange(width, device=logits.device).expand_as(logits)
    return [int(i) for i in ids.masked_fill(logits != best, width).amin(dim=1).tolist()]
