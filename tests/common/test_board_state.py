"""Boards, as their files say they are: written here in the shapes that docs/boards.md names sources for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from baru_common.board_state import MEMORY, POWER, POWER_MODE, TEMPERATURE, THROTTLED, gauges, look

NANO = {
    "var/lib/nvpmodel/status": "pmode:0002\n",
    "etc/nvpmodel.conf": "".join(
        f"< POWER_MODEL ID={number} NAME={name} >\n" for number, name in enumerate(("15W", "25W", "MAXN_SUPER"))
    ),
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "51500\n",
    "sys/class/thermal/thermal_zone8/type": "tj-thermal\n",
    "sys/class/thermal/thermal_zone8/temp": "54218\n",
    "sys/class/hwmon/hwmon3/name": "ina3221\n",
    "sys/class/hwmon/hwmon3/in1_label": "VDD_IN\n",
    "sys/class/hwmon/hwmon3/in1_input": "5088\n",
    "sys/class/hwmon/hwmon3/curr1_input": "1250\n",
    "sys/class/hwmon/hwmon3/in2_label": "VDD_CPU_GPU_CV\n",
    "sys/class/hwmon/hwmon3/in2_input": "5080\n",
    "sys/class/hwmon/hwmon3/curr2_input": "400\n",
    "sys/class/hwmon/hwmon1/name": "soctherm_oc\n",
    "sys/class/hwmon/hwmon1/oc1_event_cnt": "0\n",
    "sys/class/hwmon/hwmon1/oc3_event_cnt": "17\n",
    "proc/meminfo": "MemTotal:        7802880 kB\nMemFree:  10 kB\nMemAvailable:    6758400 kB\n",
}
THOR = {
    "var/lib/nvpmodel/status": "pmode:0001\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=120W >\n",
    "sys/class/hwmon/hwmon5/name": "ina238\n",
    "sys/class/hwmon/hwmon5/in1_label": "VIN\n",
    "sys/class/hwmon/hwmon5/in1_input": "20000\n",
    "sys/class/hwmon/hwmon5/curr1_input": "3000\n",
}


def board(root: Path, files: Mapping[str, str]) -> Path:
    """A machine with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_an_orin_nano_says_everything(tmp_path: Path) -> None:
    state = look(board(tmp_path, NANO))
    assert state.power_mode == "MAXN_SUPER"
    assert state.temperatures_c == {"cpu": 51.5, "tj": 54.218}
    assert state.throttle_events == {"oc1": 0, "oc3": 17}
    assert state.power_w == pytest.approx({"VDD_IN": 6.36, "VDD_CPU_GPU_CV": 2.032})
    assert state.board_power_w == pytest.approx(6.36)
    assert state.memory_mb == {"total": 7620.0, "available": 6600.0}
    assert str(state) == "power mode MAXN_SUPER, hottest 54 °C, 6.4 W, throttled 17 times"


def test_a_thor_says_what_it_has(tmp_path: Path) -> None:
    state = look(board(tmp_path, THOR))
    assert (state.power_mode, state.board_power_w) == ("120W", 60.0)
    assert str(state) == "power mode 120W, temperature unknown, 60.0 W, throttling unknown"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("var/lib/nvpmodel/status", "nonsense"),
        ("etc/nvpmodel.conf", "< POWER_MODEL ID=9 NAME=OTHER >"),
        ("sys/class/thermal/thermal_zone8/temp", ""),
        ("sys/class/hwmon/hwmon3/curr1_input", "n/a"),
        ("sys/class/hwmon/hwmon1/oc3_event_cnt", "\ufffd"),
    ],
)
def test_what_cannot_be_read_is_unknown_and_the_rest_is_not(name: str, text: str, tmp_path: Path) -> None:
    whole = look(board(tmp_path / "whole", NANO))
    broken = look(board(tmp_path / "broken", NANO | {name: text}))
    assert broken != whole
    parts = ("power_mode", "temperatures_c", "throttle_events", "power_w", "memory_mb")
    assert sum(getattr(broken, part) == getattr(whole, part) for part in parts) == 4


def test_a_machine_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert str(look(tmp_path)) == "power mode unknown, temperature unknown, power unknown, throttling unknown"
    assert [dict(read()) for read in gauges(tmp_path).values()] == [{}] * 5


def test_metrics_show_what_is_known_now(tmp_path: Path) -> None:
    shown = gauges(board(tmp_path, NANO))
    assert shown[POWER_MODE.name]() == {("MAXN_SUPER",): 1}
    assert shown[THROTTLED.name]()["oc3",] == 17
    assert shown[TEMPERATURE.name]()["tj",] == 54.218
    assert shown[MEMORY.name]()["available",] == 6600.0
    board(tmp_path, {"sys/class/hwmon/hwmon3/curr1_input": "2000"})
    assert shown[POWER.name]()["VDD_IN",] == pytest.approx(10.176)
