"""What a kit consists of, as a CycloneDX list: packages and models, with their digests."""

from __future__ import annotations

from collections.abc import Iterable

from baru_common import __version__
from baru_common.errors import ConfigError

from .manifest import Manifest
from .wheelhouse import Pin


def sbom(manifest: Manifest, pins: Iterable[Pin]) -> str:
    """Return it as JSON (CycloneDX 1.6). ConfigError when the library is missing."""
    try:
        from cyclonedx.model import HashAlgorithm, HashType
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'baru-drafting[kit]'") from error
    from packageurl import PackageURL

    def component(kind: ComponentType, name: str, version: str, digests: Iterable[str]) -> Component:
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in digests]
        url = PackageURL("pypi", None, name, version) if kind is ComponentType.LIBRARY else None
        return Component(
            type=kind, name=name, version=version, hashes=hashes, purl=url, bom_ref=f"{kind.value}:{name}@{version}"
        )

    digests: dict[tuple[str, str], set[str]] = {}
    for pin in pins:
        digests.setdefault((pin.name, pin.version), set()).add(pin.sha256)
    bom = Bom()
    root = component(ComponentType.APPLICATION, f"baru-kit-{manifest.kit.name}", __version__, ())
    bom.metadata.component = root
    for (name, version), found in sorted(digests.items()):
        bom.components.add(component(ComponentType.LIBRARY, name, version, found))
    for name, model in manifest.models.items():
        bom.components.add(component(ComponentType.MACHINE_LEARNING_MODEL, name, model.sha256[:12], [model.sha256]))
    bom.register_dependency(root, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
