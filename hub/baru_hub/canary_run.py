"""The canary of the hub's own drafter: the fixed prompts, greedily, through engine and drafter as they serve."""

from __future__ import annotations

from collections.abc import Sequence

from baru_common.canary_prompts import NUM_TOKENS, CanaryPrompts, canary_prompts
from baru_common.errors import BaruError, ConfigError
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.tokens import Tokenizer

from .canary import FIXED_PROMPTS, Figure, Record, Triple, figure_of
from .canary_store import CanaryLedger, this_machine, timestamp
from .engines import Engine, Feed, Want
from .mailbox import Mailbox
from .pace import OwnPace
from .session import Session


async def measured(
    engine: Engine, ledger: CanaryLedger, depth: int, *, again: bool = False, num_tokens: int = NUM_TOKENS
) -> Record:
    """Return the record of the engine's own drafter, measured now if there is none or `again`. ConfigError when the
    engine has no drafter. Nobody else may use the engine meanwhile."""
    spec, prompts = engine.spec, canary_prompts()
    if spec.drafter is None:
        raise ConfigError("there is no hub drafter to measure", hint="name one with --drafter")
    triple = Triple.of_hub(spec, prompts.digest)
    known = ledger.get(triple)
    if known and not again:
        return known
    figure = await run(engine, prompts, depth, num_tokens)
    record = Record(triple, figure, spec.target_name, spec.drafter_model, FIXED_PROMPTS, this_machine(), timestamp())
    ledger.put(record)
    ledger.save()
    return record


async def run(engine: Engine, prompts: CanaryPrompts, depth: int, num_tokens: int) -> Figure:
    """Decode every prompt and return how the drafter did."""
    tokenizer = Tokenizer(engine.spec.bundle)
    most = engine.spec.context_limit - num_tokens
    figure, sessions = Figure(), []
    try:
        for text in prompts.texts:
            ids = tokenizer.encode_text(text)[:most]
            allocation = engine.allocate(ids, len(ids) + num_tokens, None, None)
            sessions.append((allocation.sequence, _session(engine, ids, num_tokens, depth)))
        while active := [(sequence, session) for sequence, session in sessions if not session.finish]:
            figure += await _step(engine, active, depth)
    finally:
        for sequence, _ in sessions:
            engine.free(sequence)
    return figure


def _session(engine: Engine, ids: Sequence[int], num_tokens: int, depth: int) -> Session:
    spec = engine.spec
    params = SamplingParams(max_tokens=num_tokens)
    return Session(
        session_id="canary",
        epoch=1,
        sampling=SamplingContext(params, len(ids), spec.vocabulary, spec.eos_ids),
        max_length=len(ids) + num_tokens,
        mailbox=Mailbox(spec.vocabulary.size, 1),
        has_drafter=False,
        committed=list(ids),
        own=OwnPace(depth, depth=depth),
    )


async def _step(engine: Engine, active: Sequence[tuple[int, Session]], depth: int) -> Figure:
    blocks = [session.next_block(0, 1 << 20) for _, session in active]
    wants = [
        Want(sequence, session.committed, (), min(depth, block.own_depth), 1)
        for (sequence, session), block in zip(active, blocks, strict=True)
        if block.own_depth
    ]
    guesses = iter(await engine.draft(wants) if wants else ())
    fed = [block.extended(next(guesses).path, ()) if block.own_depth else block for block in blocks]
    feeds = [Feed(sequence, session.num_cached, block) for (sequence, session), block in zip(active, fed, strict=True)]
    decisions = await engine.verify(feeds)
    figure = Figure()
    for (_, session), block, decision in zip(active, fed, decisions, strict=True):
        if isinstance(decision, BaruError):
            raise decision
        verdict = session.take(block, decision)
        if verdict and block.num_path:
            figure += figure_of(block.num_path, verdict.num_guessed)
    return figure
