"""Grammars of strangers are compiled in a process apart first, with limits on time and memory."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from baru_common.errors import EngineFailure, InvalidRequest
from baru_common.sampling import Grammar
from baru_common.sampling.grammar import wrong_grammar
from baru_common.tokens import TokenizerBundle
from baru_common.waiting import within

from .quotas import Quotas

_MAX_KNOWN = 256
_START_S = 60.0
"""Time for the process to start and read the tokenizer."""

_log = logging.getLogger(__name__)


class GrammarTrials:
    """Tries grammars one after the other, one of each identity at a time. The process starts with the first."""

    def __init__(self, bundle: TokenizerBundle, eos_ids: tuple[int, ...], quotas: Quotas) -> None:
        self._bundle = bundle
        self._eos_ids = eos_ids
        self._quotas = quotas
        self._child: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """What was wrong with grammars tried before, "" if nothing; the one asked for last is last."""

    async def require_good(self, grammar: Grammar, identity: str) -> None:
        """Return when compiling `grammar` here will do no harm; InvalidRequest says what is wrong with it."""
        key = hashlib.sha256(f"{grammar.kind.value} {grammar.text}".encode()).digest()
        if key not in self._known:
            turn = self._turns.setdefault(identity, asyncio.Lock())
            async with turn, self._free:
                if key not in self._known:  # somebody else's may have been the same
                    await self._try_for(grammar, key)
        self._known.move_to_end(key)
        if what := self._known[key]:
            raise InvalidRequest(what, hint="make the grammar simpler", details={"param": "grammar"})

    async def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _try_for(self, grammar: Grammar, key: bytes) -> None:
        """Try it, to the end even if nobody wants to know any more: the next one has to wait for that."""
        trial = asyncio.ensure_future(self._try(grammar))
        try:
            await asyncio.wait([trial])
        except asyncio.CancelledError:
            await asyncio.wait([trial])
            raise
        self._known[key] = trial.result()
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try(self, grammar: Grammar) -> str:
        quotas = self._quotas
        wall_s = 5 * quotas.grammar_cpu_s
        ask = {
            "kind": grammar.kind.value,
            "text": grammar.text,
            "cpu_s": quotas.grammar_cpu_s,
            "mb": quotas.grammar_mb,
            "wall_s": wall_s,
        }
        try:
            child = await self._started()
            answer = await _exchange(child, ask, wall_s + _START_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            _log.exception("the process that tries grammars failed; it is started again with the next one")
            await self.close()
            raise EngineFailure("the hub could not try the grammar", hint="try again") from error
        if over := answer.get("over"):
            most = f"{quotas.grammar_cpu_s:g} s" if over == "time" else f"{quotas.grammar_mb} MB"
            return wrong_grammar(f"takes more {over} to compile than the {most} that one may take").message
        return str(answer.get("error", ""))

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "baru_common.sampling.grammar_child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            hello = {
                "bundle": base64.b64encode(self._bundle.data).decode(),
                "digest": base64.b64encode(self._bundle.digest).decode(),
                "eos_ids": self._eos_ids,
            }
            await _exchange(self._child, hello, _START_S)
        return self._child


async def _exchange(child: asyncio.subprocess.Process, ask: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask and return the answer; ValueError when none comes."""
    if child.stdin is None or child.stdout is None:
        raise ValueError("the process has no pipes")
    child.stdin.write(json.dumps(ask).encode() + b"\n")
    await child.stdin.drain()
    answer: dict[str, Any] = json.loads(await within(child.stdout.readline(), timeout_s))
    return answer
