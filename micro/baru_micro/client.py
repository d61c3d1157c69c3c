"""The node library: connect to a hub, generate."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from baru_common.drafters import Drafter, TextDrafter, load_drafter
from baru_common.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from baru_common.frames import DrafterInfo, HubDescription, Open
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.tokens import Message, Tokenizer

from .decoding import Generation
from .events import Event
from .fit import fitted, require_protocol
from .tokenizer_cache import cached_bundle
from .transport import HubChannel

Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, ids, or chat messages."""


class MicroNode:
    """A node connected to a hub. Made by `connect`; serves any number of generations at a time."""

    def __init__(self, channel: HubChannel, hub: HubDescription, tokenizer: Tokenizer, drafter: Drafter | None) -> None:
        self.hub = hub
        """What the hub said of itself."""
        self.tokenizer = tokenizer
        """The target's tokenizer."""
        self.drafter = drafter
        self._channel = channel
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="baru-drafter")

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, address: str, *, drafter: Drafter | TextDrafter | str | None = "ngram", timeout_s: float = 5.0
    ) -> AsyncIterator[MicroNode]:
        """Connect to the hub at HOST:PORT for the length of the block.

        `drafter` is a loaded one, a name as `load_drafter` takes it, or None to draft nothing.
        HubUnavailable when nobody answers, Incompatible when hub, node and drafter do not fit.
        """
        found = load_drafter(drafter) if isinstance(drafter, str) else drafter
        async with AsyncExitStack() as stack:
            channel = HubChannel(address, timeout_s=timeout_s)
            stack.push_async_callback(channel.close)
            hub = await channel.describe()
            require_protocol(hub)
            tokenizer = Tokenizer(await cached_bundle(hub.tokenizer_digest, channel.fetch_tokenizer))
            node = cls(channel, hub, tokenizer, await fitted(found, tokenizer))
            stack.callback(node._executor.shutdown, wait=False, cancel_futures=True)
            yield node

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: what the hub is sent, and what usage counts.

        InvalidRequest when the prompt is empty, too long for the target, or not a prompt.
        """
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"{prompt!r} is no prompt", hint="give a text, ids, or messages")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_text(prompt)
        elif all(isinstance(item, Mapping) for item in prompt):
            ids = self.tokenizer.encode_chat(cast("Sequence[Message]", prompt))
        elif all(isinstance(item, int) for item in prompt):
            ids = list(cast("Sequence[int]", prompt))
        else:
            raise InvalidRequest("the prompt mixes ids and messages", hint="give a text, ids, or messages")
        self._check(ids)
        return ids

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise EmptyPrompt("the prompt is empty", hint="send at least one token", details={"param": "prompt_ids"})
        if not 0 <= min(ids) <= max(ids) < self.hub.vocabulary_size:
            raise InvalidRequest(
                f"a prompt id is outside the vocabulary of {self.hub.vocabulary_size}", details={"param": "prompt_ids"}
            )
        most = min(self.hub.limits.max_prompt_tokens, self.hub.context_limit - 1)
        if len(ids) > most:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, at most {most} are allowed",
                hint="shorten the prompt",
                details={"param": "prompt_ids"},
            )

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation, `Finish` last.

        Leaving the loop early, or cancelling it, ends the session at the hub. Raises the BaruError
        that ends a generation which does not finish.
        """
        ids = self.prompt_ids(prompt)
        sampling = await self._sampling(params or SamplingParams(), len(ids))
        room = self.hub.context_limit - len(ids)
        generation = Generation(
            stream=self._channel.open_stream(),
            request=Open(
                prompt_ids=tuple(ids),
                params=sampling.params,
                target_fingerprint=self.hub.target_fingerprint,
                tokenizer_digest=self.hub.tokenizer_digest,
                drafter=self._drafter_info(),
            ),
            sampling=sampling,
            max_length=len(ids) + min(sampling.params.max_tokens or room, room),
            drafter=self.drafter,
            executor=self._executor,
            target=self.hub.target_name,
        )
        events = generation.events()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def _sampling(self, params: SamplingParams, num_prompt: int) -> SamplingContext:
        """Complete the parameters, and refuse here what the hub would refuse."""
        vocabulary, eos_ids = self.tokenizer.vocabulary, self.hub.eos_ids
        params.require_ids_below(vocabulary.size)
        guide = None
        if params.grammar:
            guide = await asyncio.to_thread(Guide.compile, params.grammar, self.tokenizer.bundle, eos_ids)
        # A drafter can draw as the target does only if it knows the seed.
        return SamplingContext(params.with_seed(secrets.randbits(64)), num_prompt, vocabulary, eos_ids, guide)

    def _drafter_info(self) -> DrafterInfo | None:
        if self.drafter is None:
            return None
        vocabulary = self.drafter.vocabulary
        return DrafterInfo(self.drafter.family, vocabulary.digest if vocabulary else b"")
