"""The doctor names the step that fails, stops there, and says what to do about it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baru_common.frames import HubDescription
from baru_hub.server import Hub
from baru_hub.verifier import Verifier
from baru_micro.doctor import Check, Doctor
from support.hubs import hub_of
from support.kits import kit
from support.tiny import save, tiny_target

_STEPS = ["reachable", "healthy", "versions", "tokenizer", "drafter", "posture", "round trip", "board"]
_TARGET = tiny_target()


def failed_at(checks: list[Check], name: str) -> Check:
    """All steps before `name` are fine, it is the last one, and it has advice."""
    assert [check.name for check in checks] == _STEPS[: _STEPS.index(name) + 1]
    assert [check.ok for check in checks] == [*[True] * (len(checks) - 1), False]
    assert checks[-1].found
    assert checks[-1].advice
    return checks[-1]


def changed_description(patch: pytest.MonkeyPatch, change: Callable[[HubDescription], HubDescription]) -> None:
    describe = Verifier.describe

    def described(self: Verifier) -> HubDescription:
        return change(describe(self))

    patch.setattr(Verifier, "describe", described)


@pytest.mark.parametrize("drafter", ["ngram", "none"])
async def test_a_healthy_way_passes_all_checks(drafter: str) -> None:
    """In order, each with what was found and without advice."""
    async with hub_of(_TARGET) as hub:
        checks = await Doctor(hub.address, drafter).examine()
    assert [check.name for check in checks] == _STEPS
    assert all(check.ok and check.found and not check.advice for check in checks)
    assert "tiny-0-0.0" in checks[0].found
    assert checks[3].found.startswith("300 ids")
    assert "ms" in checks[-2].found


async def test_a_hub_that_is_down() -> None:
    """The first check says so and where it looked."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        check = failed_at(await Doctor(address, "ngram", timeout_s=2.0).examine(), "reachable")
    assert address in check.found
    assert "baru-hub serve" in check.advice


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:notaport", "no.such.host.invalid:1", ""])
async def test_an_address_that_is_none(address: str) -> None:
    """A slip of the hand is a failed check, too."""
    failed_at(await Doctor(address, "ngram", timeout_s=2.0).examine(), "reachable")


async def test_a_server_that_is_no_hub() -> None:
    """Something listens there and says nothing that makes sense: the check ends in time."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        failed_at(await Doctor(address, "ngram", timeout_s=1.0).examine(), "reachable")


async def test_a_hub_that_does_not_serve() -> None:
    """It answers, and is draining."""
    async with hub_of(_TARGET) as hub:
        await hub.drain(0.0)
        check = failed_at(await Doctor(hub.address, "ngram").examine(), "healthy")
    assert "NOT_SERVING" in check.found


async def test_a_hub_of_another_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both revisions are named."""
    changed_description(monkeypatch, lambda hub: replace(hub, protocol_revision=9))
    async with hub_of(_TARGET) as hub:
        check = failed_at(await Doctor(hub.address, "ngram").examine(), "versions")
    assert "revision 9" in check.found


async def test_a_hub_that_names_another_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It describes one and serves another, as during an upgrade."""
    changed_description(monkeypatch, lambda hub: replace(hub, tokenizer_digest=b"x" * 32))
    async with hub_of(_TARGET) as hub:
        failed_at(await Doctor(hub.address, "ngram").examine(), "tokenizer")


@pytest.mark.parametrize("drafter", ["telepathy", "causal_lm:/no/such/model", "causal_lm", ""])
async def test_a_drafter_that_is_not_there(drafter: str) -> None:
    """An unknown name, a missing model, a missing argument."""
    async with hub_of(_TARGET) as hub:
        failed_at(await Doctor(hub.address, drafter).examine(), "drafter")


async def test_a_drafter_with_another_vocabulary(tmp_path: Path) -> None:
    """A real model, whose tokenizer has fewer ids than the target's."""
    folder = save(tiny_target(num_ids=290), tmp_path)
    async with hub_of(_TARGET) as hub:
        check = failed_at(await Doctor(hub.address, f"causal_lm:{folder}").examine(), "drafter")
    assert "id 290" in check.found


async def test_a_drafter_that_needs_torch_on_a_node_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8 GB board has none: the doctor says what to install instead of falling over."""
    missing: Any = None
    for name in [name for name in sys.modules if name.startswith("baru_common.drafters.causal_lm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", missing)
    hub: Hub
    async with hub_of(_TARGET) as hub:
        check = failed_at(await Doctor(hub.address, "causal_lm:/some/model").examine(), "drafter")
    assert "torch" in check.found + check.advice


async def test_a_certificate_is_looked_at_first(tmp_path: Path) -> None:
    """Whose it is and for how long; what is wrong with it, or with the hub's trust in it."""
    made = kit(tmp_path)
    alpha = made.issue("alpha")
    async with hub_of(_TARGET, tls=made.hub) as hub:
        checks = await Doctor(hub.address, "ngram", tls=alpha).examine()
        assert [check.name for check in checks] == ["certificate", *_STEPS]
        assert all(check.ok for check in checks)
        assert checks[0].found == "spiffe://kit/node/alpha, for 364 more days"
        made.revoke("alpha")
        refused = await Doctor(hub.address, "ngram", tls=alpha).examine()
        assert (refused[-1].name, refused[-1].ok) == ("reachable", False)
        assert "revoked" in refused[-1].found
        plain = failed_at(await Doctor(hub.address, "ngram").examine(), "reachable")
        assert "--tls" in plain.advice
    (alpha / "node.key").chmod(0o644)
    (check,) = await Doctor("127.0.0.1:1", "ngram", tls=alpha).examine()
    assert (check.name, check.ok) == ("certificate", False)
    assert "chmod 600" in check.advice
