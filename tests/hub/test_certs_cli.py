"""`baru-hub certs`: an authority of a kit in a folder, from nothing to a revoked certificate."""

from __future__ import annotations

import json
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from baru_common.certificates import Certificate, revoked_serials
from baru_common.errors import BaruError, ConfigError, NotFound
from baru_common.identity import Role
from baru_common.tls import TlsFiles
from baru_hub.ca import Authority
from baru_hub.certs_cli import certs_app, row


class Kits:
    """The command line, with one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str) -> str:
        result = CliRunner().invoke(certs_app, [*arguments, "--dir", str(self.folder / "ca")])
        if isinstance(result.exception, BaruError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    def shown(self) -> dict[str, dict[str, Any]]:
        told = json.loads(self("show", "--json"))
        assert told["kit"] == "demo"
        return {f"{one['name']} {one['for']}": one for one in told["certificates"]}


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kits:
    monkeypatch.chdir(tmp_path)
    kits = Kits(tmp_path)
    kits("init", "--kit", "demo")
    return kits


def certificate(path: Path) -> Certificate:
    return Certificate.read(path.read_bytes())


def purposes(found: Certificate) -> list[x509.ObjectIdentifier]:
    return list(found.document.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_machine_gets_one_folder(certs: Kits) -> None:
    """All that it needs and no more, readable by nobody else, and each certificate good for one thing."""
    certs("issue", "one", "--role", "hub", "--address", "10.0.0.1", "--address", "hub.example", "--out", "h")
    certs("issue", "alpha", "--days", "7")
    names = {folder: {path.name for path in Path(folder).iterdir()} for folder in ("h", "alpha")}
    assert names["alpha"] == {"ca.pem", "crl.pem", "node.pem", "node.key"}
    assert names["h"] == {"ca.pem", "crl.pem", "hub.pem", "hub.key", "receipts.pem", "receipts.key"}
    for path in certs.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    hub, node, signs = (certificate(Path(path)) for path in ("h/hub.pem", "alpha/node.pem", "h/receipts.pem"))
    assert str(hub.identity) == str(signs.identity) == "spiffe://demo/hub/one"
    assert set(hub.hosts) == {"hub.baru.internal", "one.hub.baru.internal", "10.0.0.1", "hub.example"}
    assert (node.hosts, signs.hosts) == ((), ())
    assert purposes(hub) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert purposes(node) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} & set(purposes(signs))
    assert isinstance(signs.document.public_key(), ed25519.Ed25519PublicKey)
    now = datetime.now(timezone.utc)
    assert node.starts < now - timedelta(hours=12)
    assert timedelta(days=6) < node.ends - now <= timedelta(days=7)
    assert TlsFiles.of("h", Role.HUB).load(Role.HUB).own.serial == hub.serial


def test_nothing_is_overwritten_by_accident(certs: Kits) -> None:
    """Neither the authority nor a machine's files; what is wrong leaves no trace."""
    with pytest.raises(ConfigError, match="has an authority already"):
        certs("init", "--kit", "demo")
    certs("issue", "alpha")
    before = Path("alpha/node.pem").read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        certs("issue", "alpha")
    assert Path("alpha/node.pem").read_bytes() == before
    certs("issue", "alpha", "--replace")
    assert Path("alpha/node.pem").read_bytes() != before
    for wrong in (("No Body",), ("x", "--days", "9999"), ("x", "--address", "10.0.0.1")):
        with pytest.raises(ConfigError):
            certs("issue", *wrong, "--out", "x")
    assert not Path("x").exists()
    with pytest.raises(ConfigError, match="there is no authority in"):
        Authority(certs.folder / "nothing")


def test_what_is_revoked_is_on_a_signed_list(certs: Kits) -> None:
    """By name all that there are, by serial one; the list goes to the hubs that are named, and is never shortened."""
    certs("issue", "one", "--role", "hub", "--out", "h")
    for name in ("alpha", "beta"):
        certs("issue", name)
    certs("issue", "alpha", "--replace")
    gone = certs("revoke", "alpha", "--out", "h")
    assert gone.count("revoked spiffe://demo/node/alpha") == 2
    beta = certificate(Path("beta/node.pem")).serial
    with pytest.raises(NotFound, match="'alpha'"):
        certs("revoke", "alpha")
    assert "copy" in certs("revoke", f"{beta:x}")
    listed = [
        revoked_serials(Path(crl).read_bytes(), Path("h/ca.pem").read_bytes()) for crl in ("h/crl.pem", "ca/crl.pem")
    ]
    assert certificate(Path("alpha/node.pem")).serial in listed[0]
    assert listed[1] - listed[0] == {beta}
    other = Authority.create(certs.folder / "other", "demo")
    with pytest.raises(ConfigError, match="not signed by the authority"):
        revoked_serials((other.folder / "crl.pem").read_bytes(), Path("h/ca.pem").read_bytes())


def test_show_says_how_things_stand(certs: Kits) -> None:
    """And warns before a certificate ends."""
    certs("issue", "alpha", "--days", "20")
    certs("issue", "beta")
    certs("issue", "gone")
    certs("revoke", "gone")
    shown = certs.shown()
    assert {name: one["state"] for name, one in shown.items()} == {
        "alpha TLS": "ends soon",
        "beta TLS": "valid",
        "gone TLS": "revoked",
    }
    assert shown["alpha TLS"]["days_left"] == 19
    assert "the certificate of alpha ends in 19 days" in certs("show")
    later = datetime.now(timezone.utc) + timedelta(days=21)
    assert row(Authority(certs.folder / "ca").issued()[0], later)["state"] == "expired"
