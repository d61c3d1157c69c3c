"""What a hub needs, and what it may take: of files and limits that are written here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from baru_common.errors import ConfigError
from baru_common.model_files import DEFAULT_TARGET, locate
from baru_hub.memory_budget import Budget, available_mb, weights_mb
from support.tiny import save, tiny_target

MEMINFO = "MemTotal: 8000000 kB\nMemAvailable: 6600000 kB\n"


def machine(root: Path, files: Mapping[str, str]) -> float | None:
    """What is available there."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_mb(root / "proc", root / "cgroup")


def test_without_limits_the_machines_memory_counts(tmp_path: Path) -> None:
    assert machine(tmp_path, {"proc/meminfo": MEMINFO}) == 6600
    assert available_mb(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup/service/memory.max": "2000000000", "cgroup/service/memory.stat": "anon 500000000\nfile 9\n"}, 1500),
        ({"cgroup/service/memory.max": "max", "cgroup/service/memory.stat": "anon 500000000"}, 6600),
        ({"cgroup/memory.max": "1000000000"}, 1000),
        ({"cgroup/service/memory.max": "9000000000"}, 6600),
    ],
)
def test_the_lowest_limit_counts(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    """Of the service and of whatever it is in."""
    assert machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/service\n", **files}) == expected


def test_limits_of_the_older_kind_count_too(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/unit\n0::/\n",
        "cgroup/memory/unit/memory.limit_in_bytes": "3000000000",
        "cgroup/memory/unit/memory.stat": "cache 7\nrss 5\ntotal_rss 1000000000\n",
    }
    assert machine(tmp_path, files) == 2000


def test_what_the_process_has_already_is_part_of_what_it_may_take(tmp_path: Path) -> None:
    assert machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/status": "Name: x\nRssAnon:\t 100000 kB\n"}) == 6700


def test_weights_are_counted_from_the_files(tmp_path: Path) -> None:
    """As many bytes as they take once they are loaded, whatever the files are in."""
    target = tiny_target()
    files = locate(str(save(target, tmp_path / "tiny")))
    num_elements = sum(weight.numel() for weight in target.model.parameters())
    assert weights_mb(files, "float32") == num_elements * 4 / 1e6
    assert weights_mb(files, "bfloat16") == num_elements * 2 / 1e6


def test_the_default_target_takes_what_its_parameters_do() -> None:
    assert weights_mb(locate(DEFAULT_TARGET), "bfloat16") == pytest.approx(269.03, abs=0.01)


def test_too_little_is_refused_with_every_part() -> None:
    budget = Budget({"program": 330, "weights": 269, "keys and values": 1024})
    budget.check(1623)
    budget.check(None)
    with pytest.raises(ConfigError) as refused:
        budget.check(1000)
    assert refused.value.message == (
        "the target needs 1623 MB (program 330, weights 269, keys and values 1024); 1000 MB are available"
    )
    assert "--kv-cache-mb" in refused.value.hint
