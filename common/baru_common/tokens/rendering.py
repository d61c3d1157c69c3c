"""Asks the process that renders chat templates; see `chat_template`. It starts with the first prompt and stays."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baru_common.errors import InvalidRequest

_PROGRAM = Path(__file__).with_name("chat_template.py")
_START_S, _ANSWER_S = 60.0, 20.0
"""Last resort: the process has a limit of its own, in processor time."""
_CHUNK_BYTES = 1 << 16


class Renderer:
    """The process, started when there is something to render and none runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the prompt; InvalidRequest when the template fails or takes too much."""
        try:
            request = json.dumps({"template": template, "variables": variables})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages cannot be written as JSON: {error}") from error
        with self._lock:
            answer = self._ask(request.encode() + b"\n")
        if "error" in answer:
            raise InvalidRequest(f"the chat template refuses these messages: {answer['error']}")
        return answer["text"]

    def _ask(self, request: bytes) -> dict[str, str]:
        try:
            process = self._process = self._process or self._started()
            if process.stdin is None:
                raise EOFError("the process has no input")
            process.stdin.write(request)
            process.stdin.flush()
            return self._answer(process, _ANSWER_S)
        except (OSError, EOFError) as error:
            self._end()
            raise InvalidRequest(
                "the chat template takes too much time or memory",
                hint="shorten the prompt, or use a target with another template",
            ) from error
        except BaseException:  # what comes next must not be taken for the answer to something else
            self._end()
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", str(_PROGRAM)]
        # Ctrl-C in a terminal is meant for whoever asks: it is blocked in the process from the first moment on.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._process = process
        self._answer(process, _START_S)
        return process

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, str]:
        """Read a line; EOFError when there will be none."""
        if process.stdout is None:
            raise EOFError("the process has no output")
        deadline_s, data = time.monotonic() + timeout_s, bytearray()
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(deadline_s - time.monotonic(), 0))
            chunk = os.read(process.stdout.fileno(), _CHUNK_BYTES) if ready else b""
            if not chunk:
                raise EOFError("no answer came")
            data += chunk
        answer: dict[str, str] = json.loads(data)
        return answer

    def _end(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


RENDERER = Renderer()
atexit.register(RENDERER.close)
