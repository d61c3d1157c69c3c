from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Tests keep their cache to themselves, but those of the real target share one that outlives the run."""
    patch = pytest.MonkeyPatch()
    folder = Path(__file__).parent.parent / ".venv" / "model-cache"
    if "target" not in request.keywords:
        folder = tmp_path_factory.mktemp("cache")
    patch.setenv("BARU_CACHE_DIR", str(folder))
    yield folder
    patch.undo()
