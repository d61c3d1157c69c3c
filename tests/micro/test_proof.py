"""A node takes a receipt only for what it has asked for and seen itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest

from baru_common.errors import HubUnavailable, ReceiptInvalid
from baru_common.frames import Finished, FinishReason, Open, Opened, Usage, Verdict
from baru_common.receipts import Statement, digests
from baru_common.signatures import SignedStatement, Trust
from baru_micro import Event, Finish
from baru_micro.decoding import Generation
from baru_micro.proof import Proof, Seen, prove
from baru_micro.reach import Reach
from support.sampling import context, letters
from support.scripted import ScriptedChannel, hubs_of
from support.signers import FINGERPRINT, HUB, OUTPUT, PARAMS, PROMPT, Kit, bare, certified, hub_key, statement

_KEY = hub_key().public_key().public_bytes_raw()
_USAGE = Usage(3, 2, 1, 3, 2, 1, 1, 1, 0)
_OPENED = Opened("s" * 16, 1, 3, 8, receipt_key=_KEY)
_REQUEST = Open(PROMPT, PARAMS, FINGERPRINT, b"")
_SEEN = Seen("loopback", _REQUEST, _OPENED, OUTPUT, num_given=0, num_own=0)


def proof(receipt: SignedStatement | None, trust: Trust | None = None, **seen: Any) -> Proof:
    return prove(Finished(FinishReason.LENGTH, _USAGE, receipt), replace(_SEEN, **seen), trust or Trust())


def test_a_receipt_that_says_what_was_seen() -> None:
    """On plain loopback nobody vouches for the key; in a kit the authority does."""
    found = proof(bare())
    assert (found.verified, found.trusted, found.reason, found.statement) == (True, False, "", statement())
    found = proof(certified(Kit.of("kit")), Trust(Kit.of("kit").pem))
    assert (found.verified, found.trusted) == (True, True)


@pytest.mark.parametrize("name", [field.name for field in fields(Statement) if not field.name.endswith(("_at", "_ns"))])
def test_each_field_must_be_what_the_node_knows(name: str) -> None:
    """Signed by the right hub, and wrong: the error names the field."""
    if name in {"prompt_digest", "params_digest", "output_digest", "target_fingerprint"}:
        changed = {
            "prompt_digest": digests(FINGERPRINT, (5, 6), PARAMS, OUTPUT),
            "params_digest": digests(FINGERPRINT, PROMPT, replace(PARAMS, seed=1), OUTPUT),
            "output_digest": digests(FINGERPRINT, PROMPT, PARAMS, (10, 12)),
            "target_fingerprint": digests(b"g" * 32, PROMPT, PARAMS, OUTPUT),
        }[name]
    elif name in {"num_output", "num_given", "num_decided"}:
        changed = {"num_given": 1, "num_decided": 1} if name == "num_given" else {"num_output": 3, "num_decided": 3}
    else:
        value = getattr(statement(), name)
        changed = {name: value + 1 if isinstance(value, int) else "x" if name != "transcript_digest" else "ab" * 32}
    with pytest.raises(ReceiptInvalid) as caught:
        proof(bare(statement(**changed)))
    assert caught.value.details["field"] in changed
    assert caught.value.details["field"] == name or name == "num_decided"


def test_who_signs_must_be_who_was_announced() -> None:
    kit = Kit.of("kit")
    with pytest.raises(ReceiptInvalid, match="another key"):
        proof(bare(), opened=replace(_OPENED, receipt_key=b"k" * 32))
    with pytest.raises(ReceiptInvalid, match="another key"):
        proof(bare(), opened=replace(_OPENED, receipt_key=b""))
    with pytest.raises(ReceiptInvalid, match="gave none"):
        proof(None)
    with pytest.raises(ReceiptInvalid, match="bare key"):
        proof(bare(), Trust(kit.pem))
    with pytest.raises(ReceiptInvalid, match="not signed by this authority"):
        proof(certified(Kit.of("other"), statement(HUB)), Trust(kit.pem))


def test_what_a_receipt_does_not_cover() -> None:
    """No receipt; ids of a session before; ids of the node's own: never verified, and it says why."""
    found = proof(None, opened=replace(_OPENED, receipt_key=b""))
    assert (found.verified, found.receipt, found.reason) == (False, None, "the hub signs no receipts")
    found = proof(bare(statement(num_given=1, num_decided=1)), num_given=1)
    assert found.statement
    assert (found.verified, "1 of 2 ids are of a session that was lost" in found.reason) == (False, True)
    found = proof(bare(), num_own=1)
    assert (found.verified, found.reason) == (False, "1 of 2 ids were decoded by this node")


# -- within a generation


async def run(*scripts: Sequence[Any]) -> list[Event]:
    channel = ScriptedChannel(scripts)
    sampling = replace(context(3, vocabulary=letters(), eos_ids=(2,)), params=PARAMS)
    with ThreadPoolExecutor(1) as executor:
        generation = Generation(
            reach=Reach(hubs_of(channel), 10.0),
            start=_REQUEST,
            sampling=sampling,
            max_length=5,
            drafter=None,
            local=None,
            executor=executor,
            target="scripted",
        )
        return [event async for event in generation.events()]


def finish_of(events: Sequence[Event]) -> Finish:
    assert isinstance(events[-1], Finish)
    return events[-1]


async def test_a_generation_with_a_bad_receipt_does_not_finish() -> None:
    closing = Finished(FinishReason.LENGTH, _USAGE, bare())
    script = [_OPENED, Verdict(1, 3, 0, 0, OUTPUT)]
    assert finish_of(await run([*script, closing])).verified
    with pytest.raises(ReceiptInvalid, match="output_digest"):
        await run([_OPENED, Verdict(1, 3, 0, 0, (10, 12)), closing])


async def test_after_a_fail_over_the_last_hub_stands_for_its_own_part_only() -> None:
    """It says how much that is; a hub that claims all is caught."""
    lost = [_OPENED, Verdict(1, 3, 0, 0, OUTPUT[:1]), HubUnavailable("gone")]
    anew = [replace(_OPENED, num_committed=4), Verdict(1, 4, 0, 0, OUTPUT[1:])]
    honest = Finished(FinishReason.LENGTH, _USAGE, bare(statement(num_given=1, num_decided=1)))
    finish = finish_of(await run(lost, [*anew, honest]))
    assert (finish.ids, finish.verified) == (OUTPUT, False)
    assert finish.proof.statement
    assert (finish.proof.statement.num_given, finish.proof.statement.num_decided) == (1, 1)
    with pytest.raises(ReceiptInvalid, match="num_given is 0, and it is 1"):
        await run(lost, [*anew, replace(honest, receipt=bare())])


async def test_a_session_that_goes_on_is_covered_whole() -> None:
    """The same hub still had it: all of it was decided in this session."""
    lost = [_OPENED, Verdict(1, 3, 0, 0, OUTPUT[:1]), HubUnavailable("gone")]
    again = [replace(_OPENED, num_committed=4, epoch=2, continued=True), Verdict(2, 4, 0, 0, OUTPUT[1:])]
    assert finish_of(await run(lost, [*again, Finished(FinishReason.LENGTH, _USAGE, bare())])).verified
