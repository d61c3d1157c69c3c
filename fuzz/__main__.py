"""Runs all of it: bytes for the decoder, rules for the protocol, frames for a live hub. The same seed does the same.

What finds a fault is kept in the folder, and named in the last line; Ctrl-C stops and says how far it came.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from . import decoding, live
from .protocol import Protocol

_SHARES = {"decoding": 0.6, "protocol": 0.3, "live": 0.1}
_MACHINES, _FRAMES, _BYTES = 20, 1000, 5000
"""Machines, frames and inputs between two lines of progress."""
_RULES = 50
"""Most rules of one machine."""
_MAX_GROWTH_BYTES = 64 << 20


def fuzz_decoding(num_cases: int, number: int, folder: Path) -> Iterator[int]:
    """Yield how many inputs have been read so far. By atheris, where it is installed."""
    if importlib.util.find_spec("atheris"):
        command = [
            sys.executable, "-m", "fuzz.decoding", str(folder / "corpus"), f"-runs={num_cases}",
            f"-seed={number % 2**31 or 1}", f"-artifact_prefix={folder}/decoding-",
        ]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            raise AssertionError(f"the decoder fails; the input is in {folder}/decoding-crash-...")
        yield num_cases
        return
    for done, data in enumerate(itertools.islice(decoding.mutants(number), num_cases), 1):
        try:
            decoding.check(data)
        except BaseException as error:
            path = folder / f"decoding-{number}-{done}.bin"
            path.write_bytes(data)
            raise AssertionError(f"the decoder fails; the input is in {path}") from error
        if done % _BYTES == 0 or done == num_cases:
            yield done


def fuzz_protocol(num_cases: int, number: int, num_machines: int = _MACHINES) -> Iterator[int]:
    """Yield how many rules have been carried out so far."""
    start = Protocol.num_rules
    options = settings(
        max_examples=num_machines,
        stateful_step_count=_RULES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for batch in itertools.count(number):
        seed(batch)(Protocol)
        run_state_machine_as_test(Protocol, settings=options)
        yield Protocol.num_rules - start
        if Protocol.num_rules - start >= num_cases:
            return


async def fuzz_live(num_cases: int, number: int) -> live.LiveHub:
    """Send so many frames to a hub; its memory must not grow with them."""
    async with live.live_hub() as hub:
        await live.flood(hub, min(_FRAMES, num_cases // 4), number)
        at_first = hub.rss_bytes
        while hub.num_frames < num_cases:
            await live.flood(hub, min(_FRAMES, num_cases - hub.num_frames), number + hub.num_frames)
            print(f"  live       {hub.num_frames:>7}  {hub.rss_bytes >> 20} MB", flush=True)
        growth = hub.rss_bytes - at_first
        assert growth <= _MAX_GROWTH_BYTES, f"the hub has grown by {growth >> 20} MB"
    return hub


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="all together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="for what finds a fault")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = {part: max(int(share * options.cases), 1) for part, share in _SHARES.items()}
    done = dict.fromkeys(cases, 0)
    print(f"seed {options.seed}: {cases}", flush=True)
    start_s = time.monotonic()
    try:
        for part, count in _parts(cases, options.seed, options.folder):
            done[part] = count
            print(f"  {part:<10} {count:>7}  {time.monotonic() - start_s:.0f} s", flush=True)
    except KeyboardInterrupt:
        print(f"stopped; seed {options.seed}, {done}")
        return 130
    except BaseException:
        path = options.folder / f"fault-{options.seed}.txt"
        path.write_text(traceback.format_exc())
        traceback.print_exc()
        print(f"FAULT; --seed {options.seed} repeats it, {path} has it, {done}")
        return 1
    print(
        f"{sum(done.values())} cases without a fault in {time.monotonic() - start_s:.0f} s; seed {options.seed}, {done}"
    )
    return 0


def _parts(cases: dict[str, int], number: int, folder: Path) -> Iterator[tuple[str, int]]:
    for count in fuzz_decoding(cases["decoding"], number, folder):
        yield "decoding", count
    for count in fuzz_protocol(cases["protocol"], number):
        yield "protocol", count
    hub = asyncio.run(fuzz_live(cases["live"], number))
    print(f"  {hub.num_honest} requests beside it, all as ever; streams ended {hub.statuses}")
    yield "live", hub.num_frames


if __name__ == "__main__":
    sys.exit(main())
