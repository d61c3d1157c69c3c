"""Case I02 of the public bug reports: an image on a host of another release says so, at once, and names both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from baru_common.errors import ConfigError
from baru_common.preflight import Release, System, look, usable_device
from support.tiny import save, tiny_target

_FILE = (
    "# R{major} (release), REVISION: {minor}.0, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Thu\n"
    "# KERNEL_VARIANT: oot\n"
)


def system(
    folder: Path, host: tuple[int, int] | None = (36, 4), image: str = "36.4", libraries: tuple[str, ...] = ()
) -> System:
    """What is found on a machine of that release."""
    file = folder / "nv_tegra_release"
    if host:
        file.write_text(_FILE.format(major=host[0], minor=host[1]))
    return look(file, {"BARU_IMAGE_L4T": image} if image else {}, libraries)


@pytest.mark.parametrize(
    ("host", "image", "words"),
    [
        (
            (36, 4),
            "38",
            r"cuda cannot be used: the image was made for another release \(host: L4T r36.4; image: L4T r38.0\)",
        ),
        ((38, 2), "36.4", r"host: L4T r38.2; image: L4T r36.4"),
        ((36, 3), "36.4", r"host: L4T r36.3; image: L4T r36.4"),
        ((36, 4), "36.3", r"host: L4T r36.4; image: L4T r36.3"),
        (None, "36.4", r"the host's release is not known \(host: no /etc/nv_tegra_release; image: L4T r36.4\)"),
    ],
)
def test_i02_an_image_for_another_release_is_refused(
    host: tuple[int, int] | None, image: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        usable_device("cuda", allow_cpu=False, system=system(tmp_path, host, image), sees_gpu=lambda: True)


@pytest.mark.parametrize(("host", "image"), [((36, 4), "36.4"), ((36, 5), "36.4"), ((36, 4), "36"), ((38, 4), "38")])
def test_i02_releases_that_go_together_are_taken(host: tuple[int, int], image: str, tmp_path: Path) -> None:
    found = system(tmp_path, host, image)
    assert usable_device("cuda:0", allow_cpu=False, system=found, sees_gpu=lambda: True) == "cuda:0"


def test_i02_a_missing_library_is_named(tmp_path: Path) -> None:
    found = system(tmp_path, libraries=("libc.so.6", "libcurand-is-not-there.so.10"))
    with pytest.raises(ConfigError, match=r"libcurand-is-not-there.so.10 cannot be loaded \(host: L4T r36.4"):
        usable_device("cuda", allow_cpu=False, system=found, sees_gpu=lambda: True)


def test_i02_a_library_that_torch_misses_is_named(tmp_path: Path) -> None:
    def sees_gpu() -> bool:
        raise OSError("libcurand.so.10: cannot open shared object file:\n No such file or directory")

    with pytest.raises(ConfigError, match=r"libcurand.so.10: cannot open shared object file: No such") as refused:
        usable_device("cuda", allow_cpu=False, system=system(tmp_path), sees_gpu=sees_gpu)
    assert "\n" not in refused.value.message


def test_i02_torch_without_a_gpu_is_refused_or_allowed(tmp_path: Path) -> None:
    found = system(tmp_path)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        usable_device("cuda", allow_cpu=False, system=found, sees_gpu=lambda: False)
    assert usable_device("cuda", allow_cpu=True, system=found, sees_gpu=lambda: False) == "cpu"
    assert usable_device("cpu", allow_cpu=False, system=found, sees_gpu=lambda: False) == "cpu"


def test_an_image_that_says_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BARU_IMAGE_L4T is 'jammy'"):
        system(tmp_path, image="jammy")


def test_releases_are_read_as_they_are_written(tmp_path: Path) -> None:
    assert system(tmp_path, (38, 4)).host == Release(38, 4)
    (tmp_path / "nv_tegra_release").write_text("something else")
    assert look(tmp_path / "nv_tegra_release", {}, ()).host is None


@pytest.mark.timeout(60)
def test_i02_a_hub_that_may_not_use_the_cpu_ends_at_once_with_one_line() -> None:
    """As it is on this machine, which has no such GPU."""
    command = (sys.executable, "-m", "baru_hub.cli", "serve", "--device", "cuda", "--listen", "127.0.0.1:0")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"BARU_IMAGE_L4T": "38"})
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: cuda cannot be used: ")
    assert "image: L4T r38.0" in error
    assert hint.startswith("what to do: ")


def test_i02_a_hub_that_may_serves_and_says_what_it_runs_on(tmp_path: Path) -> None:
    """In its first words and on its health page."""
    target = save(tiny_target(), tmp_path / "tiny")
    options = ("--device", "cuda", "--allow-cpu", "--dtype", "float32", "--kv-cache-mb", "16", "--json")
    addresses = ("--listen", "127.0.0.1:0", "--health", "127.0.0.1:0")
    command = (sys.executable, "-m", "baru_hub.cli", "serve", "--target", str(target), *options, *addresses)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout
            told = {}
            while "ready" not in told:
                event = json.loads(hub.stdout.readline())
                told[event["event"]] = event
            assert told["preflight"]["asked"] == "cuda"
            assert told["ready"]["device"] == "cpu"
            with urllib.request.urlopen(f"http://{told['ready']['health']}/readyz") as page:
                assert page.headers["X-Baru-Device"] == "cpu"
        finally:
            hub.kill()


@pytest.mark.parametrize(
    ("image", "code", "words"), [("", 0, "the node can run here"), ("36.4", 1, "image: L4T r36.4")]
)
def test_i02_a_node_asks_the_same_of_its_image(image: str, code: int, words: str) -> None:
    command = (sys.executable, "-m", "baru_micro.cli", "preflight")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"BARU_IMAGE_L4T": image})
    assert done.returncode == code
    assert words in done.stdout + done.stderr
