"""Where things are on a machine of a kit: the same on bare metal and in containers (deploy/)."""

from __future__ import annotations

from pathlib import Path

from baru_common.errors import ConfigError

SETTINGS = Path("/etc/baru/baru.toml")
TLS = Path("/etc/baru/tls")
MANIFEST = Path("/etc/baru/kit.toml")
"""What the kit consists of: for the field test."""
ALLOWED = Path("/etc/baru/allow")
"""A hub's list of who may connect; read again when it changes."""
POSTURE = Path("/etc/baru/posture.toml")
SETTINGS_FILES = (SETTINGS.name, ALLOWED.name, POSTURE.name)
API_KEYS = TLS / "api.keys"
"""Who may use the endpoint of a node in a container: its port is not on that container's loopback."""
PROGRAM = Path("/opt/baru")
RELEASES = PROGRAM / "releases"
CURRENT = PROGRAM / "current"
"""A link to the release that runs."""
MODELS = PROGRAM / "models"
COMMANDS = Path("/usr/local/bin")
UNITS = Path("/etc/systemd/system")
STATE = Path("/var/lib/baru")
PROFILE = Path("/etc/profile.d/baru.sh")
USERS = Path("/usr/lib/sysusers.d/baru.conf")
RECORD = PROGRAM / "installed.json"
"""What was put on this machine, to take it away again."""

USER_ID = 65532
"""Of the user `baru` that services run as, and that owns the keys."""
HUB_PORT, HEALTH_PORT, METRICS_PORT, ENDPOINT_PORT = 7443, 7444, 9464, 8000
IN_CONTAINERS = "0.0.0.0"  # noqa: S104  # which have an address of their own that is known only once they run


def deploy_file(*parts: str) -> Path:
    """Return a file or folder of deploy/: from the package, or from the source tree that it is run from."""
    package = Path(__file__).parents[1]
    for root in (package / "deploy", package.parents[1] / "deploy"):
        if (found := root.joinpath(*parts)).exists():
            return found
    raise ConfigError(f"deploy/{'/'.join(parts)} is missing", hint="install the package again; this one is not whole")
