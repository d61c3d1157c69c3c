from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, MambaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from baru_common.errors import ModelFileError
from baru_common.model_files import DEFAULT_TARGET, DTYPES, LoadedModel, ModelFiles, load, locate, require_truncatable
from baru_common.tokens import Tokenizer
from support.tiny import save, tiny_bundle, tiny_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder as it should be."""
    return save(tiny_target(), tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- loading


def test_a_saved_model_loads_as_it_was(folder: Path) -> None:
    """Equal logits bit for bit, the same tokenizer, template, control ids, limits."""
    before, after = tiny_target(), load(str(folder), dtype="float32")
    ids = torch.tensor([[1, 5, 9, 200, 17]])
    with torch.inference_mode():
        assert torch.equal(after.model(input_ids=ids).logits, before.model(input_ids=ids).logits)
    assert after.vocabulary.digest == before.vocabulary.digest
    assert after.eos_ids == (2,)
    assert after.context_limit == 512
    assert after.files.name == "model"
    messages = [{"role": "user", "content": "the naïve <|im_end|>"}]
    assert Tokenizer(after.bundle).encode_chat(messages) == Tokenizer(before.bundle).encode_chat(messages)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_loaded_for_inference_in_the_type_asked_for(dtype: str, folder: Path) -> None:
    loaded = load(str(folder), dtype=dtype)
    assert loaded.dtype == dtype
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training


def test_an_unknown_type_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelFileError, match="'int3'"):
        load(str(folder), dtype="int3")


def test_weights_in_several_files_are_all_found(tmp_path: Path) -> None:
    """The index says which; one that is missing is named."""
    target = tiny_target()
    folder = save(target, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    target.model.save_pretrained(folder, max_shard_size="100KB")
    files = locate(str(folder))
    assert len(files.weights) > 1
    assert set(files.weights) == set(folder.glob("*.safetensors"))
    ids = torch.tensor([[1, 5, 9]])
    with torch.inference_mode():
        loaded = load(str(folder), dtype="float32")
        assert torch.equal(loaded.model(input_ids=ids).logits, target.model(input_ids=ids).logits)
    files.weights[1].unlink()
    with pytest.raises(ModelFileError, match=files.weights[1].name):
        locate(str(folder))


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [([2, 5], 1, (2, 5)), (7, 1, (7,)), (None, 1, (1,)), (None, None, ())]
)
def test_end_ids_are_the_generation_configs_then_the_models(generation: Any, config: Any, expected: Any) -> None:
    class Ends:
        def __init__(self, eos_token_id: Any) -> None:
            self.eos_token_id = eos_token_id

    class Model:
        def __init__(self) -> None:
            self.generation_config, self.config = Ends(generation), Ends(config)

    model: Any = Model()
    assert replace(tiny_target(), model=model).eos_ids == expected


# -- what is missing or unusable


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFileError) as caught:
        load(str(folder))
    assert f"{folder / name} is missing" in caught.value.message


def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no model at .*nowhere"):
        load(str(tmp_path / "nowhere"))


def test_a_default_target_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelFileError, match=DEFAULT_TARGET):
        locate(DEFAULT_TARGET)


def test_pickled_weights_are_refused(folder: Path) -> None:
    """A .bin file can run code when it is read: it is never a model, alone or in a folder."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="only safetensors and GGUF"):
        load(str(folder))
    with pytest.raises(ModelFileError, match=r"not a \.gguf file"):
        load(str(folder / "pytorch_model.bin"))


def test_pickled_weights_named_by_an_index_are_refused(folder: Path) -> None:
    """The index is named after safetensors; what it lists must be, too."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError):
        locate(str(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_an_error_of_ours(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json"):
        load(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b'{"half": '])
def test_a_file_that_cannot_be_read_is_an_error_of_ours(name: str, data: bytes, folder: Path) -> None:
    """Whatever the loader raises, the caller gets one kind of error, and it names the model."""
    (folder / name).write_bytes(data)
    with pytest.raises(ModelFileError, match="model"):
        load(str(folder))


def test_a_broken_gguf_file_is_an_error_of_ours(tmp_path: Path, cache_folder: Path) -> None:
    """And leaves nothing behind in the cache that a later start would take for the model."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))  # sound, but nothing is in it
    assert locate(str(path)).is_gguf
    with pytest.raises(ModelFileError, match=r"broken\.gguf"):
        load(str(path))
    assert not list(cache_folder.glob("models/*"))
    assert not list(cache_folder.glob("models/.*"))


# -- code of the model's own


EVIL = "from pathlib import Path\nPath({sentinel!r}).touch()\nclass Evil: pass\n"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}),
        ("config.json", {"text_config": {"deep": [{"auto_map": {"AutoConfig": "evil.Evil"}}]}}),
        ("config.json", {"parts": [[{"trust_remote_code": True}]]}),
        ("tokenizer_config.json", {"init_kwargs": {"trust_remote_code": True}}),
    ],
)
def test_code_from_the_models_folder_is_refused_and_never_run(name: str, changes: Any, folder: Path) -> None:
    """The file that asks for it is named, and the code has left no trace."""
    sentinel = folder.parent / "it-ran"
    (folder / "evil.py").write_text(EVIL.format(sentinel=str(sentinel)))
    edit(folder / name, **changes)
    with pytest.raises(ModelFileError, match="never run") as caught:
        load(str(folder))
    assert str(folder / name) in caught.value.message
    assert not sentinel.exists()


def test_a_config_that_says_no_to_code_is_fine(folder: Path) -> None:
    edit(folder / "config.json", trust_remote_code=False, auto_map={})
    assert locate(str(folder)).path == folder


# -- where models lie


def test_the_cache_layout_of_a_model_hub_is_understood(tmp_path: Path) -> None:
    """`refs/main` names the snapshot; another one beside it is not taken."""
    repository = tmp_path / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123\n")
    (repository / "snapshots" / "000000").mkdir(parents=True)
    save(tiny_target(), repository / "snapshots" / "abc123")
    files = locate(str(repository))
    assert files == ModelFiles("models--acme--tiny", repository / "snapshots" / "abc123")
    assert load(str(repository), dtype="float32").vocabulary.size == 300


def test_a_snapshot_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("abc123")
    with pytest.raises(ModelFileError, match="abc123"):
        locate(str(tmp_path))


def test_a_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/model").path == folder


# -- what can be rolled back


def model_with(config: PreTrainedConfig) -> LoadedModel:
    class Model:
        def __init__(self) -> None:
            self.config = config

    model: Any = Model()
    return LoadedModel(ModelFiles("the-model", Path("the-model")), model, tiny_bundle(), "float32")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(
            lambda: Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=64, max_window_layers=1),
            r"'sliding_attention' \(layer 1\)",
            id="some layers",
        ),
        pytest.param(
            lambda: MistralConfig(num_hidden_layers=2, sliding_window=64), r"[Ss]liding.*\(layer 0\)", id="all layers"
        ),
        pytest.param(lambda: MambaConfig(num_hidden_layers=2), r"\(layer 0\)", id="recurrent"),
    ],
)
def test_a_state_that_cannot_be_cut_back_is_refused_by_name(config: Callable[[], PreTrainedConfig], kind: str) -> None:
    """The error names the model, the type of the layer and which one it is."""
    with pytest.raises(ModelFileError, match=f"^the-model has layers of type .*{kind}"):
        require_truncatable(model_with(config()))


@pytest.mark.parametrize("config", [Qwen2Config, GPTNeoXConfig])
def test_full_attention_is_allowed(config: type[PreTrainedConfig]) -> None:
    require_truncatable(model_with(config(num_hidden_layers=2)))  # type: ignore[call-arg]
    require_truncatable(tiny_target())


def test_a_file_that_this_user_may_not_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own user may read everything, so the refusal is made up."""

    def refuse(config: Path, _: object) -> None:
        raise PermissionError(13, "Permission denied", str(config))

    monkeypatch.setattr("baru_common.model_files.check_sizes", refuse)
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read: Permission denied"):
        locate(str(folder))
