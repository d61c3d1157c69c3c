"""From a target's logits to what it decides for one block, as the request asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baru_common.frames import TokenLogprobs
from baru_common.sampling import NO_ID
from baru_common.sampling.noise import Stream, noise_key, race, uniform
from baru_common.sampling.sampler import Sampler

from .acceptance import Decision
from .rejection import check_block, check_singly
from .session import Block
from .tree import TokenTree


def decide(logits: torch.Tensor, sampler: Sampler, committed: Sequence[int], block: Block) -> Decision:
    """Decide for one block.

    `logits` ([num_draft + 1, vocabulary]): rows of the last committed id and of each draft id, finite or -inf.
    """
    params = sampler.context.params
    logits = logits.float()
    if params.by_rejection:
        decision = _checked_by_rejection(logits, sampler, committed, block)
    else:
        decision = Decision(tuple(_chosen(logits, sampler, committed, block.tree)))
    if params.logprobs is None:
        return decision
    return Decision(decision.ids, decision.num_accepted, _logprobs(logits, decision.ids, params.logprobs))


def _chosen(logits: torch.Tensor, sampler: Sampler, committed: Sequence[int], tree: TokenTree) -> list[int]:
    """Return the target's id after the last committed one and after each node, each on its own path."""
    num_committed = len(committed)
    runs = tree.runs() or [range(0)]
    first = [*committed, *(tree.ids[node] for node in runs[0])]
    chosen = sampler.choose(logits[: len(runs[0]) + 1], first, num_committed, num_committed)
    for run in runs[1:]:
        after = num_committed + tree.depths[run.start] + 1
        rows = logits[run.start + 1 : run.stop + 1]
        chosen += sampler.choose(rows, [*committed, *tree.path(run[-1])], after, num_committed)
    return chosen


def _checked_by_rejection(logits: torch.Tensor, sampler: Sampler, committed: Sequence[int], block: Block) -> Decision:
    params, seed, first = sampler.context.params, sampler.context.seed, len(committed)
    target_probs = sampler.probs(logits, [*committed, *block.draft], first, first)
    # A step is the only one from its committed length, so `first` makes its draws independent of all others.
    positions = range(first, first + len(block.draft))
    draws = [uniform(noise_key(seed, Stream.ACCEPT, position, first)) for position in positions]
    check = check_block if params.verify_blocks else check_singly
    outcome = check(block.draft, block.draft_probs, target_probs, draws)
    own = NO_ID
    if float(outcome.residual.sum()) > 0:
        key = noise_key(seed, Stream.RESIDUAL, first + outcome.num_accepted, first)
        own = race(outcome.residual[None], [key])[0]
    return Decision((*block.draft[: outcome.num_accepted], own), outcome.num_accepted)


def _logprobs(logits: torch.Tensor, ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of `ids`, one for each of the first rows, from the plain logits."""
    rows = logits[: len(ids)].log_softmax(dim=1)
    index = torch.tensor(ids, device=rows.device).clamp_min(0)[:, None]
    own = rows.gather(1, index)[:, 0].tolist()
    values, tokens = rows.topk(num_top, dim=1)
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), values.tolist(), strict=True))
    return tuple(TokenLogprobs(logprob, top) for logprob, top in zip(own, tops, strict=True))
