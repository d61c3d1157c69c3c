"""One generation without a network: the product's own session, chain, engine and drafter, block by block.

What is measured then is how much is accepted, not how fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from baru_common.drafters import Drafter, started
from baru_common.frames import Usage
from baru_common.sampling import SamplingContext
from baru_hub.engines import Engine, Feed
from baru_hub.mailbox import Mailbox
from baru_hub.session import Session
from baru_micro.chain import DraftChain

DEPTH = 4


async def write(
    engine: Engine, drafter: Drafter, sampling: SamplingContext, prompt_ids: Sequence[int], num_tokens: int
) -> tuple[list[int], Usage]:
    """Generate `num_tokens` ids, or up to a stop, with blocks of `DEPTH`; return the output and what it took."""
    max_length = len(prompt_ids) + num_tokens
    allocation = engine.allocate(prompt_ids, max_length, None, sampling)
    session = Session(
        session_id="bench",
        epoch=1,
        sampling=sampling,
        max_length=max_length,
        mailbox=Mailbox(sampling.vocabulary.size, DEPTH),
        has_drafter=True,
        committed=list(prompt_ids),
        num_cached=allocation.num_cached,
    )
    chain = DraftChain.start(prompt_ids, session.epoch)
    stream = started(drafter, sampling)
    try:
        while session.finish is None:
            while (room := min(DEPTH - chain.ahead, max_length - 1 - len(chain.ids))) > 0:
                proposal = stream.propose(chain.ids, chain.num_committed, room)
                session.mailbox.put(chain.extend(proposal.ids, proposal.draft_probs), chain.num_committed)
                if not proposal.ids:
                    break
            block = session.next_block(DEPTH, max_length)
            (decision,) = await engine.verify([Feed(allocation.sequence, session.num_cached, block)])
            if isinstance(decision, Exception):
                raise decision
            if verdict := session.take(block, decision):
                chain.apply(verdict)
        return session.committed[len(prompt_ids) :], session.finished(session.finish).usage
    finally:
        engine.free(allocation.sequence)
