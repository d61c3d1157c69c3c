"""J01 (e): short runs of what `make fuzz` does at length; the seeds are fixed, so that CI repeats."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from fuzz import decoding
from fuzz.__main__ import fuzz_live, fuzz_protocol

_SEED = 7


def test_j01_bytes_are_a_frame_or_an_error_of_ours() -> None:
    for data in itertools.islice(decoding.mutants(_SEED), 2000):
        decoding.check(data)


def test_j01_all_seeds_can_be_read() -> None:
    """Else what is made from them tries nothing."""
    for data in decoding.seeds():
        decoding.READERS[data[0]](data[1:])


def test_j01_atheris_looks_for_bytes(tmp_path: object) -> None:
    """Where there is a wheel of it."""
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "fuzz.decoding", f"{tmp_path}/corpus", "-runs=200", "-seed=1"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "Done 200 runs" in ran.stderr


def test_j01_nodes_may_do_anything_in_any_order() -> None:
    """The hub lives, honest nodes get the target's own ids, nobody's session is touched, nothing stays."""
    for num_rules in fuzz_protocol(200, _SEED, num_machines=5):
        assert num_rules


async def test_j01_a_hub_process_outlives_fuzzed_frames() -> None:
    """Over real gRPC, with an honest node beside them; no session is left, and memory does not grow."""
    hub = await fuzz_live(600, _SEED)
    assert hub.num_frames >= 600
    assert hub.num_honest
    assert {"INVALID_ARGUMENT", "OK"} <= hub.statuses.keys()


@pytest.mark.full
async def test_j01_a_hub_process_outlives_10_000_fuzzed_frames() -> None:
    hub = await fuzz_live(10_000, _SEED)
    assert hub.num_frames >= 10_000
