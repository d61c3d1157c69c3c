"""What HTTP adds: the same request through the library and through the node's endpoint, in turn.

Hub, endpoint and this program are processes of their own on one core; the hub's target is simulated in real time. The
client is a bare socket, so that only the endpoint is under test.

Usage: python -m bench.http [--rounds N] [--tokens N] [--core N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time

import uvloop

from baru_common.sampling import SamplingParams
from baru_micro import MicroNode, Step

from .programs import program
from .store import OUT, Store, machine

STORE = Store(OUT / "http.jsonl")
PROFILE, DRAFTER, PROMPT = "thor-qwen3-8b-int4", "simulated:0.8", "Report what there is."
_WARM_UP = 3


class Timed:
    """When the parts of one answer came, seconds after it was asked for."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._times_s: list[float] = []
        self.num_tokens = 0

    def came(self, num_tokens: int) -> None:
        """Some of it is here."""
        self._times_s.append(time.perf_counter() - self._start_s)
        self.num_tokens += num_tokens

    @property
    def first_s(self) -> float:
        return self._times_s[0]

    @property
    def token_s(self) -> float:
        """Mean time of a token after the first part."""
        return (self._times_s[-1] - self._times_s[0]) / self.num_tokens


async def by_library(node: MicroNode, num_tokens: int) -> Timed:
    """Ask the node in this process."""
    timed = Timed()
    async for event in node.generate(PROMPT, SamplingParams(max_tokens=num_tokens, ignore_eos=True)):
        if isinstance(event, Step):
            timed.came(len(event.ids))
    return timed


async def by_http(address: str, model: str, num_tokens: int) -> Timed:
    """Ask the endpoint; a character of the simulated target is a token."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(data)}\r\n\r\n"
    host, port = address.split(":")
    timed = Timed()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + data)
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if line.startswith(b"data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
            timed.came(len(text))
        elif not line:
            raise SystemExit("the endpoint hung up")
    writer.close()
    return timed


async def measure(rounds: int, num_tokens: int) -> None:
    """Both in turn, the order changing."""
    async with (
        program(
            *("baru_hub.cli", "serve", "--engine", "simulated", "--profile", PROFILE, "--listen", "127.0.0.1:0")
        ) as hub,
        program(
            *("baru_micro.cli", "serve", "--hub", hub["address"], "--listen", "127.0.0.1:0", "--drafter", DRAFTER)
        ) as endpoint,
        MicroNode.connect(hub["address"], drafter=DRAFTER) as node,
    ):
        address = endpoint["url"].removeprefix("http://").removesuffix("/v1")
        pairs: list[tuple[Timed, Timed]] = []
        for number in range(rounds + _WARM_UP):
            if number % 2:
                library = await by_library(node, num_tokens)
                http = await by_http(address, endpoint["model"], num_tokens)
            else:
                http = await by_http(address, endpoint["model"], num_tokens)
                library = await by_library(node, num_tokens)
            if library.num_tokens != http.num_tokens:
                raise SystemExit(f"{library.num_tokens} tokens by the library, {http.num_tokens} over HTTP")
            pairs.append((library, http))
    pairs = pairs[_WARM_UP:]
    rows = {
        "time to first token, library, ms": [1e3 * library.first_s for library, _ in pairs],
        "time to first token, HTTP, ms": [1e3 * http.first_s for _, http in pairs],
        "HTTP adds to the first token, ms": [1e3 * (http.first_s - library.first_s) for library, http in pairs],
        "time per token, library, ms": [1e3 * library.token_s for library, _ in pairs],
        "time per token, HTTP / library": [http.token_s / library.token_s for library, http in pairs],
    }
    STORE.path.unlink(missing_ok=True)
    for name, values in rows.items():
        low, middle, high = statistics.quantiles(values, n=4)
        row = {"median": statistics.median(values), "low": low, "high": high}
        STORE.append(name, {**row, "rounds": rounds, "tokens": num_tokens, "machine": machine(), "profile": PROFILE})
        print(f"{name:36} {middle:8.3f}  ({low:.3f} to {high:.3f})")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--core", type=int, default=0)
    asked = parser.parse_args()
    os.sched_setaffinity(0, {asked.core})
    uvloop.run(measure(asked.rounds, asked.tokens))


if __name__ == "__main__":
    main()
