"""A node that starts while its hub is away, with what the hub said last time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.errors import ConfigError, HubUnavailable
from baru_common.frames import HubDescription, Limits
from baru_common.sampling import SamplingParams
from baru_micro import Fallback, Finish, LinkOptions, MicroNode, Provenance, Reconcile, Started
from baru_micro.known_hubs import recall, remember
from support.hubs import hub_of
from support.tiny import plain_greedy, tiny_target

_HUB = HubDescription(1, "0", "e", "t", b"f" * 32, b"t" * 32, b"v" * 32, 300, (2,), 512, Limits(1, 2, 3, 4))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARU_CACHE_DIR", str(tmp_path))


def test_what_a_hub_said_is_kept_by_address() -> None:
    remember("a:1", _HUB)
    remember("b:1", replace(_HUB, target_name="other"))
    assert recall("a:1") == _HUB
    assert recall("c:1") is None


@pytest.mark.parametrize("damage", [b"", b"\xff\xff\xff", b"nonsense"])
def test_what_is_damaged_is_not_known(damage: bytes, tmp_path: Path) -> None:
    remember("a:1", _HUB)
    (path,) = (tmp_path / "hubs").iterdir()
    path.write_bytes(damage)
    assert recall("a:1") is None


async def test_a_node_with_a_model_answers_alone() -> None:
    """Once it has met the hub; what it says is its own model's, and provisional."""
    model, prompt, params = tiny_target(noise=0.2), [1, 5, 9], SamplingParams(max_tokens=12, ignore_eos=True)
    async with hub_of(tiny_target()) as hub:
        address = hub.address
        with pytest.raises(HubUnavailable):
            async with MicroNode.connect("127.0.0.1:1", drafter=CausalLmDrafter(model), timeout_s=2):
                raise AssertionError
        async with MicroNode.connect(address, drafter=CausalLmDrafter(model)):
            pass
    options = LinkOptions(reconcile=Reconcile.KEEP)
    async with MicroNode.connect(address, drafter=CausalLmDrafter(model), options=options, timeout_s=2) as node:
        events = [event async for event in node.generate(prompt, params)]
    assert events[0] == Started("", "tiny-0-0.0", 3)
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert list(finish.ids) == plain_greedy(model, prompt, 12)
    assert {span.provenance for span in finish.spans} == {Provenance.PROVISIONAL}


async def test_a_node_without_a_model_needs_its_hub() -> None:
    async with hub_of(tiny_target()) as hub:
        async with MicroNode.connect(hub.address):
            pass
        with pytest.raises(ConfigError, match="no model"):
            async with MicroNode.connect(hub.address, options=LinkOptions(fallback=Fallback.LOCAL)):
                raise AssertionError
    for options in (LinkOptions(), LinkOptions(fallback=Fallback.WAIT), LinkOptions(fallback=Fallback.FAIL)):
        with pytest.raises(HubUnavailable):
            async with MicroNode.connect(hub.address, timeout_s=2, options=options):
                raise AssertionError
