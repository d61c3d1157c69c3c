"""Reading draft heads as they are published: a folder with config.json and one file of weights.

Names and keys differ between those who publish; here they become one. Nothing is executed: safetensors, or a torch
archive read with `weights_only`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from baru_common.errors import ModelFileError
from baru_common.fingerprint import files_digest
from baru_common.model_checks import read_json, refuse_code, require_inside
from baru_common.model_files import ModelFiles

_FILES = ("model.safetensors", "pytorch_model.bin")
MAX_TAP_IDS = 16
_MTP_NAME = re.compile(r"^mtp\.|^model\.mtp_layers\.|^model\.layers\.(\d+)\.")


def read_folder(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return configuration and tensors of the head in a folder; ModelFileError says what is wrong with it."""
    folder, config, weights = _files(path)
    if not config.is_file() or weights is None:
        missing = "config.json" if not config.is_file() else " or ".join(_FILES)
        raise ModelFileError(f"{folder} holds no draft head: {missing} is missing")
    for file in (config, weights):
        require_inside(file, folder)
    raw = read_json(config)
    refuse_code(config)
    try:
        if weights.suffix == ".safetensors":
            tensors = load_file(weights)
        else:
            tensors = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a reader trips over, the file is at fault
        raise ModelFileError(f"{weights} cannot be read: {error}") from error
    if not isinstance(raw, dict) or not isinstance(tensors, dict):
        raise ModelFileError(f"{folder} holds no draft head: its files are of another kind")
    return raw, tensors


def folder_digest(path: str) -> str:
    """SHA-256 over configuration and weights of a head that can be read, hex."""
    _, config, weights = _files(path)
    return files_digest(file for file in (config, weights) if file)


def _files(path: str) -> tuple[Path, Path, Path | None]:
    """Return the folder of a head, its configuration, and its weights if they are there."""
    folder = Path(path).expanduser()
    weights = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    return folder, folder / "config.json", weights


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Put every tensor in its place; ModelFileError names one that is missing, left over, or of another shape."""
    own = module.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        parts = [
            f"{title} {', '.join(names[:5])}" for title, names in (("missing", missing), ("unknown", extra)) if names
        ]
        raise ModelFileError(f"{what} has another layout than its configuration says: {'; '.join(parts)}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ModelFileError(
                f"{what}: {name} is {tuple(tensors[name].shape)}, its configuration says {tuple(tensor.shape)}"
            )
    module.load_state_dict(dict(tensors))


def tap_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return which of the target's hidden states a head reads: 0 is the embedding, i the output of the first i layers.

    Published ids mean the same where they start at 2 or later, and the layer before where they start at 1
    (sglang#25454). None given: 2, the middle, and the third from the end (Li et al., code).
    """
    nested = raw.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    ids = raw.get(key, nested.get(key))
    if ids is None:
        return (2, num_layers // 2, num_layers - 3)
    if not isinstance(ids, list) or not 1 <= len(ids) <= MAX_TAP_IDS or not all(isinstance(i, int) for i in ids):
        raise ModelFileError(f"{key} is {ids!r}, must be a list of layer numbers")
    taps = tuple(i + 1 if ids[0] == 1 else i for i in ids)
    # The last one would have to be read before the target's final norm, which is not built.
    if not all(0 <= tap < num_layers for tap in taps):
        raise ModelFileError(f"{key} is {ids}, the target has {num_layers} layers: up to {num_layers - 1} can be read")
    return taps


def extra_tensors(files: ModelFiles, num_layers: int) -> dict[str, torch.Tensor]:
    """Return the tensors that the checkpoint of a target of so many layers has for its MTP head, and no others;
    ModelFileError for a GGUF file."""
    if files.is_gguf:
        raise ModelFileError(f"{files.name} is a GGUF file, which has no MTP head", hint="use the safetensors release")
    found: dict[str, torch.Tensor] = {}
    for path in files.weights:
        with safe_open(path, framework="pt") as archive:
            for name in archive.keys():  # noqa: SIM118  # not a dictionary
                match = _MTP_NAME.search(name)
                if match and int(match[1] or num_layers) >= num_layers:
                    found[name] = archive.get_tensor(name)
    return found
