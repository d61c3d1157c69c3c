"""The node library: connect to a hub, generate."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from baru_common.board import detected_tier
from baru_common.discovery import Place, resolved
from baru_common.drafters import Drafter, DrafterIdentity, TextDrafter, identity_of, load_drafter
from baru_common.errors import BaruError, EmptyPrompt, InvalidRequest, PromptTooLong
from baru_common.frames import DrafterInfo, HubDescription, Open, Posture
from baru_common.identity import Identity
from baru_common.observers import Told
from baru_common.reread import Reread
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.tls import MEMBERS, Credentials, TlsFiles
from baru_common.tokens import Message, Tokenizer
from baru_common.trace_context import TraceContext
from baru_common.trust import trust_in_kit
from baru_common.workloads import DEFAULT_WORKLOAD, check_workload

from .decoding import Fallback, Generation, Reconcile
from .events import Event, Finish
from .fallback import LocalDecoder, LocalModel, local_model, require_model
from .fit import Shaping, agreed_shape, fitted, require_protocol
from .hubs import FailBack, Hubs
from .link import Link, Timers
from .observing import NodeObserver, Request
from .reach import LINK_ERRORS, Reach
from .tokenizer_cache import cached_bundle
from .transport import HubChannel

_log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, ids, or chat messages."""


@dataclass(frozen=True)
class LinkOptions:
    """How a node behaves when the way to its hub breaks."""

    fallback: Fallback | None = None
    """None: local if the drafter has a model of the target's vocabulary, else wait."""
    reconcile: Reconcile = Reconcile.REWRITE
    fail_back: FailBack = FailBack.NEXT
    retry_budget_s: float = 60.0
    """Time to look for a hub, in each outage."""
    timers: Timers = field(default_factory=Timers)
    shaping: Shaping = Shaping.AUTO
    tier: str | None = None
    """Tier of this node in the hub's posture document; None: as the board's name says, else "unknown"."""
    workload: str = DEFAULT_WORKLOAD
    """Kind of work that the output is: one of `AUTOREGRESSIVE`."""

    def __post_init__(self) -> None:
        check_workload(self.workload)

    def may_decode(self, drafter: Drafter | TextDrafter | None) -> bool:
        """Whether a node with this drafter decodes by itself while no hub answers."""
        return self.fallback in (None, Fallback.LOCAL) and local_model(drafter) is not None


async def _describe(hubs: Hubs, *, may_be_away: bool) -> HubDescription:
    """Ask the hubs; where they may be away, what one of them said last will do."""
    try:
        return await hubs.describe()
    except LINK_ERRORS as error:
        known = hubs.recall() if may_be_away else None
        if known is None:
            raise
        _log.warning("%s; going on with what it said last", error)
        return known


def _pinned(files: TlsFiles | None, place: Place) -> TlsFiles | None:
    """A hub that was found by name has to prove that name; ConfigError when it is none that can be proven."""
    return replace(files, hub=Identity.parse(place.identity).name) if files and place.identity else files


def _observed_link(address: str, timers: Timers, tell: Told[NodeObserver]) -> Link:
    tell(lambda observer: observer.hub_known(address))
    return Link(
        timers,
        on_change=lambda state: tell(lambda observer: observer.link_changed(address, state)),
        on_sample=lambda elapsed_s: tell(lambda observer: observer.round_trip(address, elapsed_s)),
    )


async def _observed(generation: Generation) -> AsyncGenerator[Event, None]:
    """Yield what a generation says, and tell observers of it first."""
    request, tell, error = generation.observed, generation.tell, "left"

    def said(event: Event) -> None:
        tell(lambda observer: observer.said(request, event))

    tell(lambda observer: observer.began(request))
    events = generation.events()
    try:
        async for event in events:
            said(event)
            if isinstance(event, Finish):
                error = ""
            yield event
    except BaruError as failure:
        error = failure.reason
        raise
    finally:
        await events.aclose()
        tell(lambda observer: observer.ended(request, error))


class MicroNode:
    """A node connected to its hubs. Made by `connect`; serves any number of generations at a time."""

    def __init__(
        self,
        hubs: Hubs,
        hub: HubDescription,
        tokenizer: Tokenizer,
        drafter: Drafter | None,
        options: LinkOptions,
        identity: DrafterIdentity,
        tell: Told[NodeObserver],
    ) -> None:
        self.hub = hub
        """What the hub said of itself."""
        self.tokenizer = tokenizer
        """The target's tokenizer."""
        self.drafter = drafter
        self._local: LocalModel | None = None
        if options.fallback is Fallback.LOCAL:
            self._local = require_model(drafter)
        elif options.fallback is None:
            self._local = local_model(drafter)
        self._fallback = options.fallback or (Fallback.LOCAL if self._local else Fallback.WAIT)
        self._options = options
        self._tls: Reread[Credentials] | None = None
        """Who this node is, and whose receipts it takes."""
        self._hubs = hubs
        self._tier = detected_tier() if options.tier is None else options.tier
        self._identity = identity
        self._tell = tell
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="baru-drafter")

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        hub: str | Sequence[str],
        *,
        drafter: Drafter | TextDrafter | str | None = "ngram",
        timeout_s: float = 5.0,
        options: LinkOptions | None = None,
        tls: TlsFiles | Path | str | None = None,
        observers: Iterable[NodeObserver] = (),
    ) -> AsyncIterator[MicroNode]:
        """Connect to the hub at HOST:PORT or found by `mdns:IDENTITY`, or to the first of several that answers, for the
        length of the block.

        `drafter` is a loaded one, a name as `load_drafter` takes it, or None to draft nothing. `tls` is the folder that
        `baru-hub certs issue` has made for this machine, or None for a hub on this machine that speaks plainly.
        `observers` are told what happens.
        HubUnavailable when nobody answers, unless the node can decode by itself and a hub answered before;
        Incompatible when hub, node and drafter do not fit, ConfigError when the node is to decode by itself and has no
        model, or its files are wrong; Unauthenticated when one side does not trust the other.
        """
        found = load_drafter(drafter) if isinstance(drafter, str) else drafter
        options, tell = options or LinkOptions(), Told(observers)
        files = TlsFiles.of(tls, *MEMBERS) if tls else None
        async with AsyncExitStack() as stack:
            places = await resolved([hub] if isinstance(hub, str) else hub)
            channels = [
                HubChannel(
                    p.address,
                    timeout_s=timeout_s,
                    link=_observed_link(p.address, options.timers, tell),
                    tls=_pinned(files, p),
                    shaping=options.shaping,
                )
                for p in places
            ]
            hubs = Hubs(channels, options.fail_back)
            stack.push_async_callback(hubs.close)
            description = await _describe(hubs, may_be_away=options.may_decode(found))
            require_protocol(description)
            agreed_shape(options.shaping, description.traffic_shape)
            fetch = hubs.current.fetch_tokenizer
            tokenizer = Tokenizer(await cached_bundle(description.tokenizer_digest, fetch))
            fitting = await fitted(found, tokenizer)
            identity = await asyncio.to_thread(identity_of, fitting)
            node = cls(hubs, description, tokenizer, fitting, options, identity, tell)
            node._tls = files.watched(*MEMBERS) if files else None
            stack.callback(node._executor.shutdown, wait=False, cancel_futures=True)
            hubs.watch()
            yield node

    @property
    def link(self) -> Link:
        """The way to the hub that serves this node."""
        return self._hubs.current.link

    async def hub_serves(self) -> bool:
        """Ask the hub. False: it does not answer, or is about to go down; `link.state` alone is as old as what was
        heard last."""
        try:
            return await self._hubs.current.health() == "SERVING"
        except BaruError:
            return False

    @property
    def hub_address(self) -> str:
        """Where the hub is that serves this node."""
        return self._hubs.current.address

    @property
    def posture(self) -> Posture | None:
        """What a hub let this node do, last; None before the first generation, or where hubs do not say."""
        return self._hubs.posture

    @property
    def fallback(self) -> Fallback:
        """What a generation does while no hub answers, unless the hub's posture chooses for it."""
        return self._fallback

    def prompt_ids(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the ids of a prompt: what the hub is sent, and what usage counts. `tools`: what the chat template is
        to offer the model.

        InvalidRequest when the prompt is empty, too long for the target, or not a prompt.
        """
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"{prompt!r} is no prompt", hint="give a text, ids, or messages")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_text(prompt)
        elif all(isinstance(item, Mapping) for item in prompt):
            ids = self.tokenizer.encode_chat(cast("Sequence[Message]", prompt), tools=tools)
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

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reconcile: Reconcile | None = None,
        trace: TraceContext | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation, `Finish` last. `reconcile`: as in `LinkOptions`, for this one. `trace`:
        the caller's own span, if it has one. `tools`: as `prompt_ids` takes them.

        Leaving the loop early, or cancelling it, ends the session at the hub. Raises the BaruError
        that ends a generation which does not finish.
        """
        ids = self.prompt_ids(prompt, tools=tools)
        sampling = await self._sampling(params or SamplingParams(), len(ids))
        room = self.hub.context_limit - len(ids)
        generation = Generation(
            reach=Reach(self._hubs, self._options.retry_budget_s),
            start=Open(
                prompt_ids=tuple(ids),
                params=sampling.params,
                target_fingerprint=self.hub.target_fingerprint,
                tokenizer_digest=self.hub.tokenizer_digest,
                drafter=self._drafter_info(),
                tier=self._tier,
                workload=self._options.workload,
            ),
            sampling=sampling,
            max_length=len(ids) + min(sampling.params.max_tokens or room, room),
            drafter=self.drafter,
            local=LocalDecoder(self._local, sampling) if self._local else None,
            executor=self._executor,
            target=self.hub.target_name,
            fallback=self._fallback,
            obeys_fallback=self._options.fallback is None,
            reconcile=reconcile or self._options.reconcile,
            timers=self._options.timers,
            observed=self._observed(len(ids), trace),
            tell=self._tell,
            **self._trust(),
        )
        events = _observed(generation)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def _trust(self) -> dict[str, Any]:
        """Say whose receipts count, by the files that are there now."""
        if self._tls is None:
            return {}
        self._tls.refresh()
        credentials = self._tls.value
        return {"trust": trust_in_kit(credentials), "identity": str(credentials.own.identity)}

    def _observed(self, num_prompt: int, parent: TraceContext | None) -> Request:
        own = TraceContext.new()
        if parent:
            own = replace(own, trace_id=parent.trace_id, sampled=parent.sampled)
        return Request(own, self.drafter.family if self.drafter else "", num_prompt, parent)

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
        model = self._identity
        digest = vocabulary.digest if vocabulary else b""
        return DrafterInfo(self.drafter.family, digest, model.model[:128], model.digest, model.engine[:128])
