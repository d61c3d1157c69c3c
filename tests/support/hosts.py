"""Machines of a kit, each with systemd as its first process, and a network between them that reaches nothing else.

Namespaces keep them apart: processes, mounts, names, network, cgroups. A machine's files are this one's, with changes
in memory that are its own and go with it. Needs root, cgroup v2, overlayfs and systemd; skips the test where they are
missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .emulator import ip

SYSTEMD = Path("/lib/systemd/systemd")
PYTHON = "/usr/bin/python3"
"""The machine's own; one in a home would not be readable for a service's user."""
BUNDLE = "/media/kit"
"""Where a machine finds what is carried to it."""
_INIT = Path(__file__).with_name("host_init.sh")
_ROOT = Path(__file__).parents[2]
_UP_S = 60.0


def missing() -> str:
    """What this machine lacks for machines of their own; empty if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it takes root on Linux"
    for tool in ("ip", "nsenter", "pivot_root", "unshare"):
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing"
    for file in (SYSTEMD, Path(PYTHON)):
        if not file.exists():
            return f"{file} is missing"
    known = Path("/proc/filesystems").read_text().split()
    return "".join(f"no {name} in this kernel" for name in ("cgroup2", "overlay") if name not in known)


class Host:
    """One machine."""

    def __init__(self, name: str, address: str, lab: Lab, bundle: Path) -> None:
        self.name, self.address, self.bundle = name, address, bundle
        self._lab = lab
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def root(self) -> Path:
        """Its files, seen from here."""
        return Path(f"/proc/{self._pid}/root")

    def start(self) -> None:
        """Switch it on: with nothing on it but what this machine has."""
        namespace = self._lab.plug(self)
        scratch = self._lab.folder / self.name
        scratch.mkdir(exist_ok=True)
        group = self._lab.cgroups / f"{namespace}"
        group.mkdir(exist_ok=True)
        hidden = (str(_ROOT), str(Path.home()))
        inside = ("bash", str(_INIT), self.name, str(scratch), str(self.bundle), *hidden)
        unshare = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child", *inside)
        self._process = subprocess.Popen(
            (
                "sh",
                "-c",
                'echo 0 >"$0/cgroup.procs"; exec "$@"',
                str(group),
                "ip",
                "netns",
                "exec",
                namespace,
                *unshare,
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pid = self._first_process()
        self.until("systemctl is-system-running", within_s=_UP_S, accept=("running", "degraded"))

    def _first_process(self) -> int:
        """What the machine itself calls process 1."""
        assert self._process
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        end_s = time.monotonic() + _UP_S
        while time.monotonic() < end_s:
            for child in children.read_text().split():
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
            time.sleep(0.05)
        raise TimeoutError(f"systemd does not start on {self.name}")

    def command(self, command: str) -> tuple[str, ...]:
        """What runs a shell's command there, as root would at its keyboard."""
        enter = ("nsenter", "--target", str(self._pid), "--all", "--wdns=/")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return (*enter, "env", "-i", f"PATH={path}", f"BARU_PYTHON={PYTHON}", "sh", "-lc", command)

    def run(self, command: str, *, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a shell's command there to its end."""
        done = subprocess.run(
            self.command(command), capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {command}: {done.returncode}\n{done.stdout}{done.stderr}{self.journal()}"
            )
        return done

    def journal(self) -> str:
        """The last that its services said."""
        return self.run("journalctl --no-pager --lines=40 --unit='baru-*'", check=False).stdout

    def until(self, command: str, within_s: float = 60.0, accept: tuple[str, ...] = ()) -> str:
        """Run it again and again until it succeeds, or says one of `accept`."""
        end_s = time.monotonic() + within_s
        while True:
            done = self.run(command, check=False)
            said = done.stdout.strip()
            if said in accept or (not accept and not done.returncode):
                return said
            if time.monotonic() > end_s:
                raise AssertionError(f"{self.name}: {command} still fails: {said}{done.stderr}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Switch it off, at once; all that was on it is lost."""
        if self._process:
            os.kill(self._pid or self._process.pid, 9)
            self._process.wait()
        self._process, self._pid = None, 0


class Lab:
    """A network of machines."""

    def __init__(self, folder: Path, cgroups: Path) -> None:
        self.folder, self.cgroups = folder, cgroups
        self._switch = f"barukit{os.getpid()}"
        self._plugged: dict[str, str] = {}
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Lab]:
        """Make the network; machines that are left at the end are switched off."""
        if reason := missing():
            pytest.skip(f"no machines of their own: {reason}")
        with tempfile.TemporaryDirectory() as made:
            folder, cgroups = Path(made, "machines"), Path(made, "cgroups")
            folder.mkdir()
            cgroups.mkdir()
            subprocess.run(("mount", "-t", "cgroup2", "none", str(cgroups)), check=True)
            lab = cls(folder, cgroups)
            try:
                yield lab
            finally:
                lab.close()
                subprocess.run(("umount", str(cgroups)), check=True)

    def plug(self, host: Host) -> str:
        """Give a machine its cable; return its network namespace."""
        if host.name in self._plugged:
            return self._plugged[host.name]
        namespace = f"{self._switch}-{host.name}"
        ip("netns", "add", namespace)
        port = f"p-{host.name}"[:15]
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        self._plugged[host.name] = namespace
        return namespace

    def pull(self, host: Host) -> None:
        """Pull a machine's cable."""
        ip("-n", self._switch, "link", "set", f"p-{host.name}"[:15], "down")

    def push(self, host: Host) -> None:
        """Put it back."""
        ip("-n", self._switch, "link", "set", f"p-{host.name}"[:15], "up")

    def close(self) -> None:
        """Remove the network."""
        for name in (*self._plugged.values(), self._switch):
            subprocess.run(("ip", "netns", "delete", name), check=False)
