"""A scripted target with a published device's timing: for load and link experiments on any machine.

It decides what `baru_common.scripted` says and takes the time that its profile says. Everything around
it is real: sessions, mailbox, scheduler, gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import tokenizers
import tomli
from tokenizers import decoders, models, pre_tokenizers

from baru_common import __version__, scripted
from baru_common.errors import BaruError, ConfigError, EngineFailure
from baru_common.fingerprint import fingerprint
from baru_common.sampling import SamplingContext
from baru_common.tokens import TokenizerBundle, Vocabulary
from baru_common.tokens.vocabulary import BYTE_LEVEL_ALPHABET
from baru_hub.acceptance import Decision
from baru_hub.cost_model import CostModel, StepShape
from baru_hub.guesses import Guesses

from .base import Allocation, EngineSpec, Feed, Want

CONTEXT_LIMIT = 1 << 17


@dataclass(frozen=True)
class DeviceProfile:
    """Step times of a target on a device; derived from published figures, see data/devices.toml."""

    name: str
    plain_s: tuple[float, float]
    """A step of one session, and of eight, without drafts."""
    row_s: float
    """Each further row."""

    @classmethod
    def load(cls, name: str) -> DeviceProfile:
        """Return the shipped profile of this name; ConfigError names those there are."""
        targets = devices()["targets"]
        if name not in targets:
            raise ConfigError(f"there is no device profile {name!r}", hint=f"use one of: {', '.join(sorted(targets))}")
        one, eight = targets[name]["plain_ms"]
        return cls(name, (one / 1e3, eight / 1e3), targets[name]["row_ms"] / 1e3)

    def step_s(self, shape: StepShape) -> float:
        """Time of a step: linear in sessions through the two published sizes, then by row."""
        one, eight = self.plain_s
        extra = max(shape.num_rows - shape.num_sessions, 0)
        return one + (eight - one) / 7 * (shape.num_sessions - 1) + extra * self.row_s


@cache
def devices() -> dict[str, Any]:
    """The shipped device data."""
    data: dict[str, Any] = tomli.loads((resources.files("baru_hub") / "data" / "devices.toml").read_text())
    return data


class SimulatedEngine:
    """Decides by script, in a device's time. `sleep` lets that time pass: really, or on a virtual clock."""

    def __init__(self, profile: DeviceProfile, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._profile = profile
        self._sleep = sleep
        self._handles = itertools.count(1)
        bundle = _bundle()
        vocabulary = Vocabulary.from_tokenizer_json(bundle.tokenizer_json)
        self._spec = EngineSpec(
            engine="simulated",
            target_name=f"simulated {profile.name}",
            fingerprint=fingerprint({"profile": profile.name}),
            bundle=bundle,
            vocabulary=vocabulary,
            eos_ids=(scripted.EOS_ID,),
            context_limit=CONTEXT_LIMIT,
            samples=False,
            runtime=f"baru {__version__}",
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    async def calibrate(self) -> CostModel:
        """See `Engine.calibrate`. Steps are timed like any others', only not waited for."""
        shapes = [StepShape(rows, sessions, 0) for rows, sessions in ((1, 1), (8, 1), (16, 1), (8, 8), (32, 8))]
        return CostModel.calibrated((shape, self._profile.step_s(shape)) for shape in shapes)

    def allocate(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002
        max_length: int,  # noqa: ARG002
        identity: str | None,  # noqa: ARG002
        sampling: SamplingContext | None = None,  # noqa: ARG002  # greedy, as the spec says
    ) -> Allocation:
        """See `Engine.allocate`. There is no cache to fill, or to run out of."""
        return Allocation(next(self._handles), 0)

    def free(self, sequence: int) -> None:
        """See `Engine.free`."""

    async def verify(self, feeds: Sequence[Feed]) -> list[Decision | BaruError]:
        """See `Engine.verify`."""
        num_rows = sum(len(feed.block.pending) + len(feed.block.draft) for feed in feeds)
        await self._sleep(self._profile.step_s(StepShape(num_rows, len(feeds), 0)))
        return [_decided(feed) for feed in feeds]

    async def draft(self, wants: Sequence[Want]) -> list[Guesses]:
        """See `Engine.draft`. There is no drafter."""
        raise EngineFailure(f"a simulated target has no drafter of its own; {len(wants)} sequences asked for one")

    async def close(self) -> None:
        """See `Engine.close`."""


def _decided(feed: Feed) -> Decision:
    if not feed.block.decides:
        return Decision()
    first = feed.num_cached + len(feed.block.pending)
    return Decision(tuple(scripted.scripted_id(first + i) for i in range(len(feed.block.draft) + 1)))


def _bundle() -> TokenizerBundle:
    """A tokenizer of two control ids and the 256 bytes, with a plain chat template."""
    specials = ["<|start|>", "<|end|>"]
    bytes_in_order = sorted(BYTE_LEVEL_ALPHABET, key=BYTE_LEVEL_ALPHABET.__getitem__)
    vocab = {token: i for i, token in enumerate((*specials, *bytes_in_order))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    template = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
    return TokenizerBundle(tokenizer.to_str(), template, {"bos_token": specials[0], "eos_token": specials[1]})
