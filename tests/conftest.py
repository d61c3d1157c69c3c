from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import baru_common.folders
from baru_common.model_files import DEFAULT_TARGET, LoadedModel, load


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Tests keep cache and state to themselves, but those of the real target use the cache that outlives the run."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARU_STATE_DIR", str(folder / "state"))
        if "target" in request.keywords:
            yield baru_common.folders.cache_folder()
            return
        patch.setenv("BARU_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def default_target() -> LoadedModel:
    """The real default target in fp32, loaded once."""
    return load(DEFAULT_TARGET, dtype="float32")
