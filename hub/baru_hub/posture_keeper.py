"""Nusku at a running hub: the posture document in force, what it means for each node, and who has been measured.

The verifier asks, the document and the canary's ledger answer. A document that changes on disk is taken over while
sessions run; one that is not valid, or older without anybody having gone back to it, changes nothing and is reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from baru_common.board import UNKNOWN_TIER
from baru_common.canary_prompts import canary_prompts
from baru_common.errors import BaruError, ConfigError
from baru_common.frames import DrafterInfo, Posture

from .canary import LIVE_SESSIONS, Admission, Figure, Record, Standing, Triple, figure_of, judge
from .canary_store import CanaryLedger, this_machine, timestamp
from .engines.base import EngineSpec
from .posture import Decision, Document, decide
from .posture_store import PostureStore, read_document, shipped

POLL_S = 1.0
_MAX_WINDOWS = 64
"""Drafters that are measured at a time; the one that was heard longest ago gives way."""
_MAX_CACHED = 1024
_ADMITTED = Admission(Standing.ADMITTED)
_log = logging.getLogger(__name__)


class PostureSource:
    """Where a hub's document comes from: a file, or a folder as `PostureStore` keeps it."""

    def __init__(self, path: Path) -> None:
        self._store = None if path.is_file() or path.suffix == ".toml" else PostureStore(path)
        self._path = self._store.path if self._store else path

    @property
    def folder(self) -> Path | None:
        """The folder; None: it is just a file."""
        return self._store.folder if self._store else None

    def read(self) -> Document:
        """Return the document; ConfigError when it is not valid."""
        return self._store.current() if self._store else read_document(self._path)[1]

    def stamp(self) -> object:
        """Differs when the file may have changed."""
        with suppress(OSError):
            stat = self._path.stat()
            return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None

    def went_back_to(self, document: Document) -> bool:
        """True when somebody has gone back to this earlier document on purpose."""
        return self._store is not None and self._store.was_rolled_back_to(document)


class PostureKeeper:
    """Says what drafting may be done at a hub with one engine."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        source: PostureSource | None = None,
        tier: str = UNKNOWN_TIER,
        model: str = "",
        ledger: CanaryLedger | None = None,
    ) -> None:
        """`source`: None: the shipped document. `tier`: of the hub itself. `model`: class of the target, its name
        unless given. `ledger`: what canaries have measured; None: drafters are admitted unseen.

        ConfigError when the document is not valid.
        """
        self._spec = spec
        self._source = source
        self._stamp = source.stamp() if source else None
        self.document = source.read() if source else shipped()
        self.tier = tier
        self.model = model or spec.target_name
        self.problem = ""
        """Why the document on disk is not in force; empty: it is."""
        self._ledger = ledger
        self._own = Triple.of_hub(spec, canary_prompts().digest) if spec.drafter else None
        self._windows: OrderedDict[Triple, tuple[Figure, DrafterInfo]] = OrderedDict()
        self._postures: dict[tuple[str, DrafterInfo | None, int], Posture] = {}
        self._own_depths: dict[int, int | None] = {}
        self._measured: set[DrafterInfo] = set()
        """Drafters of which there are records."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when any answer may be another one now."""
        self.on_document: Callable[[Document], None] = lambda _: None
        """Called when another document has taken the place of the one in force."""

    @property
    def name(self) -> str:
        """The document in force, and whose rules of it the hub itself follows."""
        return f"version {self.document.version} ({self.document.digest.hex()[:12]}), tier {self.tier}"

    # -- what the verifier asks

    def for_node(self, tier: str, drafter: DrafterInfo | None, batch: int) -> Posture:
        """Return what a node may do while `batch` sessions are decoded."""
        key = (self.document.tier(tier), drafter, batch)
        posture = self._postures.get(key)
        if posture is None:
            if len(self._postures) >= _MAX_CACHED:  # nodes say what they like of their drafters
                self._postures.clear()
            posture = self._postures[key] = self._for_node(*key)
        return posture

    def own_depth(self, batch: int) -> int | None:
        """Return how deep the hub's own drafter may go; None: as deep as it pays, 0: not at all."""
        if batch not in self._own_depths:
            self._own_depths[batch] = self._own_depth(batch)
        return self._own_depths[batch]

    def _own_depth(self, batch: int) -> int | None:
        if self._spec.drafter is None:
            return None
        allowed = decide(self.document, self.tier, self.model, batch).local
        if not allowed.allows(self._spec.drafter) or self.own_admission().standing is not Standing.ADMITTED:
            return 0
        return allowed.max_depth

    def observe(self, drafter: DrafterInfo | None, num_verified: int, num_accepted: int) -> None:
        """Take in what a step said of a node's drafter. Once there is enough of it, its drafter is judged."""
        if self._ledger is None or drafter is None or not drafter.digest or drafter in self._measured:
            return
        triple = Triple.of_node(self._spec, drafter)
        if self._ledger.get(triple):
            if len(self._measured) < _MAX_CACHED:
                self._measured.add(drafter)
            return
        before, _ = self._windows.pop(triple, (Figure(), drafter))
        figure = before + figure_of(num_verified, num_accepted)
        if figure.num_tried < self.document.canary.window:
            self._windows[triple] = figure, drafter
            if len(self._windows) > _MAX_WINDOWS:
                self._windows.popitem(last=False)
            return
        record = Record(
            triple, figure, self._spec.target_name, drafter.model, LIVE_SESSIONS, this_machine(), timestamp()
        )
        self._ledger.put(record)
        admission = judge(record, self.document.floor(drafter.family, self.model))
        level = logging.ERROR if admission.standing is Standing.REFUSED else logging.INFO
        _log.log(level, "%s: %s", record.row.drafter, admission.reason)
        self._changed()

    def own_admission(self) -> Admission:
        """Return the standing of the hub's own drafter."""
        if self._ledger is None or self._own is None:
            return _ADMITTED
        return judge(self._ledger.get(self._own), self.document.floor(self._own.family, self.model))

    def judged(self) -> list[tuple[Record, Admission]]:
        """Return all that canaries have measured, and how drafters stand by it."""
        records = self._ledger.records() if self._ledger else []
        return [(record, judge(record, self.document.floor(record.triple.family, self.model))) for record in records]

    def _for_node(self, tier: str, drafter: DrafterInfo | None, batch: int) -> Posture:
        decision = decide(self.document, tier, self.model, batch)
        allowed = decision.upward
        if drafter and allowed.on and not allowed.allows(drafter.family):
            families = ", ".join(allowed.drafters)
            return self._posture(decision, drafting=False, reason=f"{drafter.family} is not among {families}")
        admission = self._admission(drafter)
        if allowed.on and admission.standing is Standing.REFUSED:
            return self._posture(decision, drafting=False, reason=admission.reason)
        if allowed.on and admission.standing is Standing.PROBATION:
            limits = (allowed.max_depth, self.document.canary.depth)
            depth = min(limit for limit in limits if limit is not None)
            posture = self._posture(decision, drafting=True, reason=admission.reason, max_depth=depth)
            return replace(posture, probation=True)
        return self._posture(decision, drafting=allowed.on, reason=decision.because, max_depth=allowed.max_depth)

    def _posture(self, decision: Decision, *, drafting: bool, reason: str, max_depth: int | None = None) -> Posture:
        return Posture(
            drafting=drafting,
            max_depth=max_depth,
            max_ahead=decision.upward.max_ahead,
            drafters=decision.upward.drafters,
            fallback=decision.fallback or "",
            reason=reason,
            rule=decision.rule,
            document_version=self.document.version,
            document_digest=self.document.digest,
        )

    def _admission(self, drafter: DrafterInfo | None) -> Admission:
        if self._ledger is None or drafter is None or not drafter.digest:
            return _ADMITTED  # what only repeats what it has seen has no weights that an engine could run wrong
        record = self._ledger.get(Triple.of_node(self._spec, drafter))
        return judge(record, self.document.floor(drafter.family, self.model))

    # -- when the document changes

    def refresh(self) -> bool:
        """Look whether the document, or the ledger, has changed on disk, and take it over; return whether it was."""
        return self._take_over(*self._look())

    @asynccontextmanager
    async def watching(self, poll_s: float = POLL_S) -> AsyncIterator[None]:
        """Refresh now and again for the length of the block, and keep what was measured."""
        task = asyncio.create_task(self._watch(poll_s), name="baru-posture")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._ledger:
                await asyncio.to_thread(self._ledger.save)

    async def _watch(self, poll_s: float) -> None:
        while True:
            await asyncio.sleep(poll_s)
            try:
                self._take_over(*await asyncio.to_thread(self._look))
                if self._ledger:
                    await asyncio.to_thread(self._ledger.save)
            except Exception:  # whatever is wrong with a disk, the hub goes on with what it knows
                _log.exception("looking for another posture document failed")

    def _look(self) -> tuple[Document | BaruError | None, list[Record] | None]:
        """Read what is on disk; nothing where it is what was read last."""
        return self._document_found(), self._ledger.look() if self._ledger else None

    def _document_found(self) -> Document | BaruError | None:
        if self._source is None:
            return None
        stamp = self._source.stamp()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            document = self._source.read()
            if document.digest != self.document.digest:
                self._require_later(document, self._source)
        except BaruError as error:
            return error
        return document

    def _require_later(self, document: Document, source: PostureSource) -> None:
        if document.version <= self.document.version and not source.went_back_to(document):
            raise ConfigError(
                f"it has version {document.version}, and version {self.document.version} is in force",
                hint="give it a higher version, or go back with `baru-hub posture rollback`",
            )

    def _take_over(self, found: Document | BaruError | None, records: list[Record] | None) -> bool:
        changed = records is not None and self._ledger is not None and self._ledger.take(records)
        if isinstance(found, BaruError):
            self.problem = str(found)
            _log.error("the posture document was not taken over, version %d stays: %s", self.document.version, found)
        elif found is not None:
            self.problem = ""
            if found.digest != self.document.digest:
                _log.warning(
                    "posture document %d (%s) takes the place of %d (%s)",
                    *(found.version, found.digest.hex()[:12]),
                    *(self.document.version, self.document.digest.hex()[:12]),
                )
                self.document = found
                self.on_document(found)
                changed = True
        if changed:
            self._changed()
        return changed

    def _changed(self) -> None:
        self._postures.clear()
        self._own_depths.clear()
        self._measured.clear()
        self.on_change()
