"""A process that compiles grammars of strangers, each in a fork of its own with limits on time and memory.

Reads lines of JSON and answers each with one: first a tokenizer ({"bundle", "digest", "eos_ids"}, bytes in base64),
then grammars ({"kind", "text", "cpu_s", "mb", "wall_s"}). An answer is {"ok": true}, {"error": what is wrong with the
grammar}, or {"over": the limit that it ran into}. Ends with its input.

Usage: python -m baru_common.sampling.grammar_child
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from baru_common.errors import BaruError
from baru_common.tokens import TokenizerBundle

from .grammar import Grammar, GrammarKind
from .guide import Guide, prepare

_NUM_STEPS = 64
"""Steps that are tried: most of what grows too large to follow does so at once."""
_OUT_OF_TIME = {signal.SIGXCPU, signal.SIGPROF, signal.SIGKILL}


def main() -> None:
    """Answer until the input ends."""
    hello = json.loads(sys.stdin.readline())
    bundle = TokenizerBundle.from_bytes(base64.b64decode(hello["bundle"]), base64.b64decode(hello["digest"]))
    eos_ids = tuple(hello["eos_ids"])
    prepare(bundle, eos_ids)
    _say({"ok": True})
    for line in sys.stdin:
        _say(_tried(json.loads(line), bundle, eos_ids))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _tried(ask: dict[str, Any], bundle: TokenizerBundle, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """Compile in a fork; what it does to itself happens to nobody else."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _compile(ask, bundle, eos_ids, writing)
    os.close(writing)
    try:
        said = _read(reading, time.monotonic() + ask["wall_s"])
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if said:
        answer: dict[str, Any] = json.loads(said)
        return answer
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _OUT_OF_TIME
    return {"over": "time" if killed else "memory"}


def _read(reading: int, deadline_s: float) -> bytes:
    said = b""
    while select.select([reading], [], [], max(deadline_s - time.monotonic(), 0))[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        said += piece
    return said


def _compile(ask: dict[str, Any], bundle: TokenizerBundle, eos_ids: tuple[int, ...], writing: int) -> None:
    """The fork's whole life."""
    try:
        _limit(ask["cpu_s"], ask["mb"] << 20)
        answer: dict[str, Any] = {"ok": True}
        Guide.compile(Grammar(GrammarKind(ask["kind"]), ask["text"]), bundle, eos_ids).walk(_NUM_STEPS, eos_ids)
    except BaruError as error:
        answer = {"error": error.message}
    except MemoryError:
        answer = {"over": "memory"}
    except BaseException as error:  # nothing may get past here: this is a copy of its parent
        answer = {"error": f"grammar cannot be compiled: {type(error).__name__}"}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def _limit(cpu_s: float, num_bytes: int) -> None:
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = math.ceil(cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # finer than whole seconds
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
