"""What a hub signs and writes down where a request enters and leaves, with a target by script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baru_common.errors import EmptyPrompt, HubUnavailable, Unauthenticated
from baru_common.frames import Finished, FinishReason, HubFrame, Open, Opened, Resume, Verdict
from baru_common.identity import Role
from baru_common.receipts import Statement, digests, verify
from baru_common.signatures import Trust
from baru_hub.audit import Record, check_log, log_files
from baru_hub.audit_log import AuditLog
from baru_hub.checkpoint import Checkpoint
from baru_hub.live import LiveSession
from baru_hub.orphans import LinkPolicy
from baru_hub.signing import Notary, default_folder
from baru_hub.verifier import Verifier
from baru_micro import MicroNode
from support.hubs import hub_of
from support.kits import kit
from support.link import PROMPT, Shown, asked, script, scripted_engine, until
from support.lockstep import free_running
from support.signers import NOW


@asynccontextmanager
async def hub(folder: Path, **link: Any) -> AsyncIterator[tuple[Verifier, Notary, AuditLog]]:
    notary = Notary(folder / "key", certified=False)
    audit = AuditLog(folder / "audit", notary)
    audit.start()
    checkpoint = Checkpoint(notary, audit, wall_clock=lambda: NOW)
    async with Verifier(
        scripted_engine(0.0), free_running(), link=LinkPolicy(**link), checkpoint=checkpoint
    ) as verifier:
        yield verifier, notary, audit
    audit.close()


def request(verifier: Verifier, num_tokens: int) -> Open:
    return Open(PROMPT, asked(num_tokens), verifier.spec.fingerprint, verifier.spec.bundle.digest)


async def read(live: LiveSession) -> list[HubFrame]:
    return [frame async for frame in live.frames()]


def said(frames: Sequence[HubFrame], notary: Notary) -> Statement:
    """What the receipt in the closing frame says; the key was announced in the first one."""
    assert isinstance(frames[-1], Finished)
    assert isinstance(frames[0], Opened)
    assert frames[0].receipt_key == notary.public_key
    assert frames[-1].receipt
    return verify(frames[-1].receipt, Trust(key=notary.public_key))[0]


def told(folder: Path) -> list[tuple[str, str]]:
    check_log(folder / "audit", Trust())
    records = [
        Record.from_line(line + b"\n")
        for path in log_files(folder / "audit")
        for line in path.read_bytes().splitlines()
    ]
    return [(record.event, str(record.fields.get("reason", ""))) for record in records]


async def test_a_session_from_its_entry_to_its_exit(tmp_path: Path) -> None:
    async with hub(tmp_path) as (verifier, notary, _):
        statement = said(await read(await verifier.open(request(verifier, 6), "spiffe://kit/node/a")), notary)
    names = digests(verifier.spec.fingerprint, PROMPT, asked(6), script(6))
    assert {name: getattr(statement, name) for name in names} == names
    assert (statement.num_output, statement.num_decided, statement.num_given) == (6, 6, 0)
    assert (statement.node, statement.hub, statement.finish_reason) == ("spiffe://kit/node/a", "loopback", "length")
    assert statement.elapsed_ns > 0
    assert told(tmp_path) == [("session_opened", ""), ("session_finished", "length")]
    kept = b"".join(path.read_bytes() for path in log_files(tmp_path / "audit"))
    assert statement.transcript_digest.encode() in kept


async def test_ids_that_a_node_brings_along_are_given_not_decided(tmp_path: Path) -> None:
    async with hub(tmp_path) as (verifier, notary, _):
        resume = Resume("", b"", 0, tuple(script(2)))
        statement = said(await read(await verifier.open(replace(request(verifier, 6), resume=resume))), notary)
    assert (statement.num_output, statement.num_decided, statement.num_given) == (6, 4, 2)
    assert statement.output_digest == digests(b"", (), asked(6), script(6))["output_digest"]


async def test_what_was_finished_without_its_node_is_signed_when_it_comes_back(tmp_path: Path) -> None:
    async with hub(tmp_path) as (verifier, notary, _):
        live = await verifier.open(request(verifier, 6))
        live.lose()
        await until(lambda: live.state.finish)
        resume = Resume(live.state.session_id, live.key, 1)
        frames = await read(await verifier.open(replace(request(verifier, 6), resume=resume)))
    assert (said(frames, notary).num_decided, said(frames, notary).num_given) == (6, 0)
    assert told(tmp_path) == [("session_opened", ""), ("session_resumed", ""), ("session_finished", "length")]


async def test_a_cancelled_session_is_signed_too(tmp_path: Path) -> None:
    async with hub(tmp_path) as (verifier, notary, _):
        live = await verifier.open(request(verifier, 10_000))
        await until(lambda: live.state.num_steps)
        live.finish(FinishReason.CANCELLED)
        frames = await read(live)
    ids = [token for frame in frames if isinstance(frame, Verdict) for token in frame.token_ids]
    statement = said(frames, notary)
    assert (statement.finish_reason, statement.num_output) == ("cancelled", len(ids))
    assert statement.output_digest == digests(b"", (), asked(6), ids)["output_digest"]


async def test_who_is_refused_and_what_fails_is_written_down(tmp_path: Path) -> None:
    async with hub(tmp_path, orphan_grace_s=0) as (verifier, _, _):
        with pytest.raises(EmptyPrompt):
            await verifier.open(replace(request(verifier, 6), prompt_ids=()))
        (await verifier.open(request(verifier, 10_000))).lose()
        (await verifier.open(request(verifier, 10_000))).fail(HubUnavailable("gone"))
        await verifier.drain(0)
    assert told(tmp_path) == [
        ("session_refused", "EMPTY_PROMPT"),
        ("session_opened", ""),
        ("session_failed", "ABANDONED"),
        ("session_opened", ""),
        ("session_failed", "HUB_UNAVAILABLE"),
        ("drain", ""),
    ]


async def test_nobody_enters_whom_the_log_cannot_name(tmp_path: Path) -> None:
    """While it cannot be written; who is there already goes on."""
    async with hub(tmp_path) as (verifier, notary, audit):
        live = await verifier.open(request(verifier, 6))
        audit._failure = "No space left on device"
        with pytest.raises(HubUnavailable, match="No space left"):
            await verifier.open(request(verifier, 6))
        audit._failure = ""
        assert said(await read(live), notary).num_decided == 6


def test_a_key_is_made_once_and_private(tmp_path: Path) -> None:
    first = Notary(tmp_path / "state", certified=False)
    assert Notary(tmp_path / "state", certified=False).public_key == first.public_key
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["receipts.key"]
    assert (tmp_path / "state" / "receipts.key").stat().st_mode & 0o777 == 0o600


async def test_in_a_kit_the_authority_vouches_for_the_hub(tmp_path: Path) -> None:
    """The audit log is on; a new certificate is taken with the next receipt, and who is denied is written down."""
    made = kit(tmp_path)
    alpha, beta = made.issue("alpha"), made.issue("beta")
    proofs = []
    async with hub_of(scripted_engine(0.0), tls=made.hub, scheduler=free_running()) as served:
        async with MicroNode.connect(served.address, drafter=None, tls=alpha) as node:
            for _ in range(2):
                shown = await Shown().follow(node, 6)
                assert shown.finish
                proofs.append(shown.finish.proof)
                made.issue("one", Role.HUB, replace=True)
        made.revoke("beta")
        with pytest.raises(Unauthenticated):
            async with MicroNode.connect(served.address, drafter=None, tls=beta):
                pass
    for proof in proofs:
        assert (proof.verified, proof.trusted) == (True, True)
        assert proof.statement
        assert (proof.statement.hub, proof.statement.node) == ("spiffe://kit/hub/one", "spiffe://kit/node/alpha")
        assert proof.receipt
        assert verify(proof.receipt, Trust((alpha / "ca.pem").read_bytes()))[1].trusted
    assert len({proof.signer.public_key for proof in proofs if proof.signer}) == 2
    report = check_log(default_folder(), Trust((alpha / "ca.pem").read_bytes()))
    events = [json.loads(line) for path in log_files(default_folder()) for line in path.read_bytes().splitlines()]
    assert report.num_records == len(events)
    assert [e["event"] for e in events if e["event"] != "identity_denied"] == [
        "hub_started",
        *["session_opened", "session_finished"],
        *["session_opened", "certificate_reloaded", "session_finished"],
        "hub_stopped",
    ]
    assert {e["identity"] for e in events if e["event"] == "identity_denied"} == {"spiffe://kit/node/beta"}
