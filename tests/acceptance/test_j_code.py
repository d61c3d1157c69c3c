"""J01 (a), (c), J04: nothing that was sent, and no model's own code, ever runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

import baru_hub.cli
import baru_micro.cli
from baru_common.drafters import load_drafter
from baru_common.errors import BaruError, ConfigError, InvalidRequest, ModelFileError, TokenizerMismatch
from baru_common.model_files import load
from baru_common.tokens import Tokenizer, TokenizerBundle
from baru_hub.config import HubConfig
from baru_hub.drafters.checkpoint import read_folder
from baru_micro import MicroNode
from support import code_scan
from support.hubs import hub_of
from support.tiny import save, tiny_bundle, tiny_target, twin

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("common/baru_common", "hub/baru_hub", "micro/baru_micro", "bench", "tools", "fuzz")

# -- J01 (a)


def test_j01_none_of_our_code_runs_what_it_reads() -> None:
    """No unpickling, evaluating, shells, code of a model's, nor a port for everybody, but in a container of its own."""
    found = code_scan.scan(*(_ROOT / package for package in _PACKAGES))
    assert [line for line in found if "hub/baru_hub/kit/places.py" not in line] == []
    assert len(found) == 1


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("import os, dill", "dill"),
        ("from cloudpickle import loads", "cloudpickle"),
        ("import marshal", "marshal"),
        ("import shelve", "shelve"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("x = eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("compile(text, '', 'exec')", "compile"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("run(text, shell=flag)", "shell"),
        ("os.system(text)", "system"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle"),
        ("Auto.from_pretrained(path, trust_remote_code=True)", "trust_remote_code"),
        ("Auto.from_pretrained(path, trust_remote_code=config.trust)", "trust_remote_code"),
        ("def serve(listen: str = '0.0.0.0:7443'): ...", "listens on 0.0.0.0:7443"),
    ],
)
def test_j01_the_scan_finds_each(source: str, what: str) -> None:
    assert list(code_scan.findings("# a line\n" + source)) == [f"2: {what}"]


def test_j01_what_is_safe_is_not_found() -> None:
    safe = """
re.compile(p); model.eval(); torch.load(p, weights_only=True); numpy.load(p, allow_pickle=False); json.loads(t)
load(p, trust_remote_code=False); subprocess.run([a], shell=False); yaml.safe_load(t)
"""
    assert list(code_scan.findings(safe)) == []


def test_j01_a_hub_listens_on_loopback_and_a_port_for_everybody_is_refused() -> None:
    assert HubConfig().listen.startswith("127.0.0.1:")
    with pytest.raises(ConfigError):
        HubConfig(listen="0.0.0.0:7443")


# -- J04


def _folder(path: Path) -> Path:
    return save(tiny_target(), path)


def _edit(path: Path, **values: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | values))


_REMOTE = ("evil.EvilConfig", "evil.EvilModel", "evil.EvilTokenizer")
_AUTO_MAP = {"AutoConfig": _REMOTE[0], "AutoModelForCausalLM": _REMOTE[1], "AutoTokenizer": [_REMOTE[2], _REMOTE[2]]}
_ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "config": ("config.json", {"auto_map": _AUTO_MAP}),
    "another repository": ("config.json", {"auto_map": {"AutoConfig": "else/where--evil.EvilConfig"}}),
    "nested": ("config.json", {"text_config": {"x": [{"trust_remote_code": True}]}}),
    "tokenizer": ("tokenizer_config.json", {"auto_map": _AUTO_MAP}),
    "generation": ("generation_config.json", {"auto_map": _AUTO_MAP}),
    "adapter": ("adapter_config.json", {"trust_remote_code": True}),
}


@pytest.fixture(params=_ASKS)
def evil(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model's folder that asks for code of its own, and the file that the code would write."""
    folder, sentinel = _folder(tmp_path / "evil"), tmp_path / "sentinel"
    (folder / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').close()\n")
    name, values = _ASKS[request.param]
    _edit(folder / name, **values)
    return folder, sentinel


_LOADERS: dict[str, Callable[[str], object]] = {
    "target": load,
    "draft": lambda path: load_drafter(f"causal_lm:{path}"),
    "draft with another tokenizer": lambda path: load_drafter(f"foreign_lm:{path}"),
}


@pytest.mark.parametrize("what", _LOADERS)
def test_j04_a_model_with_code_of_its_own_is_refused(what: str, evil: tuple[Path, Path]) -> None:
    """As a target, as a drafter and as a drafter with another tokenizer, wherever it asks; and nothing runs."""
    folder, sentinel = evil
    with pytest.raises(ModelFileError, match=r"never run"):
        _LOADERS[what](str(folder))
    assert not sentinel.exists()


@pytest.mark.parametrize("nested", [False, True])
def test_j04_a_draft_head_with_code_of_its_own_is_refused(nested: bool, tmp_path: Path) -> None:
    """Before its weights are read."""
    asks: dict[str, Any] = {"auto_map": _AUTO_MAP}
    _edit(tmp_path / "config.json", **({"eagle_config": asks} if nested else asks))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelFileError, match="never run"):
        read_folder(str(tmp_path))


_COMMANDS: dict[str, tuple[Any, Callable[[str], list[str]]]] = {
    "hub target": (baru_hub.cli.app, lambda path: ["serve", "--target", path, "--listen", "127.0.0.1:0"]),
    "hub prepare": (baru_hub.cli.app, lambda path: ["prepare", "--target", path]),
    "hub distill": (baru_hub.cli.app, lambda path: ["distill", path, "--out", path, "--target", path]),
    "node": (baru_micro.cli.app, lambda path: ["generate", "hello", "--drafter", f"causal_lm:{path}"]),
}


@pytest.mark.parametrize("command", _COMMANDS)
def test_j04_the_commands_refuse_it_too(command: str, tmp_path: Path) -> None:
    """And have no switch that would allow it: neither for the target, nor for the draft."""
    folder, sentinel = _folder(tmp_path / "evil"), tmp_path / "sentinel"
    (folder / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').close()\n")
    _edit(folder / "config.json", auto_map=_AUTO_MAP)
    app, arguments = _COMMANDS[command]
    result = CliRunner().invoke(app, arguments(str(folder)))
    assert isinstance(result.exception, ModelFileError)
    assert "never run" in str(result.exception)
    allowed = CliRunner().invoke(app, [*arguments(str(folder)), "--trust-remote-code"])
    assert allowed.exit_code == 2
    assert "No such option" in allowed.output
    assert not sentinel.exists()


@pytest.mark.parametrize("table", ["hub", "target"])
def test_j04_no_setting_allows_it(table: str, tmp_path: Path) -> None:
    path = tmp_path / "hub.toml"
    path.write_text(f"[{table}]\ntrust_remote_code = true\n")
    result = CliRunner().invoke(baru_hub.cli.app, ["serve", "--config", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert "trust_remote_code" in str(result.exception)


async def test_j04_a_hub_cannot_make_a_node_load_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node drafts with what its own options name, whatever the hub's description says."""
    loaded: list[str] = []
    monkeypatch.setattr("baru_common.model_files._load", lambda files, *_: loaded.append(files.name))
    name = f"causal_lm:{_folder(tmp_path / 'evil')}"
    target = twin(tiny_target())
    object.__setattr__(target, "files", type(target.files)(name, target.files.path))
    target.files.__dict__["digest"] = "another name"
    async with hub_of(target) as hub, MicroNode.connect(hub.address, drafter="ngram") as node:
        assert node.hub.target_name == name
        assert [event async for event in node.generate([5, 6, 7])]
    assert loaded == []


# -- files that lie about their sizes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 200}, "num_hidden_layers"),
        ({"vocab_size": 1 << 23}, "vocab_size"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"text_config": {"hidden_size": 1 << 22, "intermediate_size": 1 << 22}}, "hidden_size"),
    ],
)
def test_j04_a_configuration_that_its_weights_cannot_be_is_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Before anything of that size is made."""
    _edit(_folder(tmp_path) / "config.json", **values)
    with pytest.raises(ModelFileError, match=words):
        load(str(tmp_path))


def _header(**tensors: Any) -> bytes:
    data = json.dumps(tensors).encode()
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        _header(a={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}),
        _header(
            a={"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            b={"dtype": "U8", "shape": [8], "data_offsets": [4, 12]},
        )
        + bytes(12),
        _header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}) + bytes(4),
        b"\xff\xff\0\0\0\0\0\0" + b"[" * 0xFFFF,
    ],
)
def test_j04_a_safetensors_header_that_lies_is_refused(data: bytes, tmp_path: Path) -> None:
    """Of a model and of a head: too long, past the end, overlapping, of another shape, nested without end."""
    (_folder(tmp_path) / "model.safetensors").write_bytes(data)
    for reading in (load, read_folder):
        with pytest.raises(ModelFileError):
            reading(str(tmp_path))


def _gguf(keys: bytes = b"", num_keys: int = 0, num_tensors: int = 0, tensors: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_keys) + keys + tensors


def _key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


_MOST = (1 << 64) - 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        _gguf(num_keys=_MOST),
        _gguf(num_tensors=_MOST),
        _gguf(struct.pack("<Q", _MOST), 1),
        _gguf(_key("a", 8, struct.pack("<Q", 1 << 40)), 1),
        _gguf(_key("a", 9, struct.pack("<IQ", 4, 1 << 60)), 1),
        _gguf(_key("a", 9, struct.pack("<IQ", 8, 1 << 60)), 1),
        _gguf(_key("a", 9, struct.pack("<IQ", 9, 1)), 1),
        _gguf(_key("a", 77, b""), 1),
        _gguf(_key("llama.block_count", 4, struct.pack("<I", 10**9)), 1),
        _gguf(_key("llama.embedding_length", 4, struct.pack("<I", 1 << 31)), 1),
        _gguf(num_tensors=1, tensors=struct.pack("<Q1sI", 1, b"t", 1 << 30)),
        _gguf(num_tensors=1, tensors=struct.pack("<Q1sI2QIQ", 1, b"t", 2, 1 << 40, 1 << 40, 0, 0)),
        _gguf(num_tensors=1, tensors=struct.pack("<Q1sI1QIQ", 1, b"t", 1, 1, 0, 1 << 50)),
    ],
)
def test_j04_a_gguf_header_that_lies_is_refused(data: bytes, tmp_path: Path) -> None:
    """Counts, lengths and sizes that the file cannot hold; before anything is made of them."""
    path = tmp_path / "wild.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="GGUF"):
        load(str(path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_j04_a_link_out_of_a_model_is_refused(name: str, tmp_path: Path) -> None:
    """A folder holds its files itself; a model hub's cache links within its own folder, and is served."""
    folder, elsewhere = _folder(tmp_path / "model"), tmp_path / name
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ModelFileError, match="leads out of"):
        load(str(folder))


def test_j04_a_snapshot_outside_its_cache_is_refused(tmp_path: Path) -> None:
    _folder(tmp_path / "model")
    cache = tmp_path / "models--a--b"
    (cache / "refs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    (cache / "refs" / "main").write_text("../../model")
    with pytest.raises(ModelFileError, match="leads out of"):
        load(str(cache))


def test_j04_a_giant_tokenizer_is_refused(tmp_path: Path) -> None:
    """Unread: the file here is as long as it says, and empty."""
    with (_folder(tmp_path) / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFileError, match="larger than"):
        load(str(tmp_path))


# -- a hub's tokenizer is foreign to a node


def _with_template(template: str) -> Tokenizer:
    bundle = tiny_bundle()
    return Tokenizer(TokenizerBundle(bundle.tokenizer_json, template, bundle.special_tokens))


_DOUBLING = "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        _DOUBLING,
        "{{ 'a' * 10**10 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ 'a'|center(10**10) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ 'a' * 10**7 }}",
    ],
)
def test_j04_a_wild_chat_template_costs_its_request_only(template: str) -> None:
    """Loops without end, texts without bounds, and ways out of the sandbox; the next prompt is rendered as ever."""
    message = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidRequest, match="chat template"):
        _with_template(template).encode_chat(message)
    assert Tokenizer(tiny_bundle()).encode_chat(message)


@pytest.mark.parametrize(
    "wild",
    [
        {"model": {"type": "BPE", "vocab": {"a": (1 << 32) - 1}, "merges": []}},
        {"added_tokens": [{"id": 1 << 31, "content": "x", "special": True}]},
        {"model": None},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "c"]]}},
        {"model": {"type": "BPE", "vocab": {"l": 1, "o": 2, "lo": 3}, "merges": [["l", "o"], ["lo", "lo"]]}},
        {"decoder": {"type": "WordPiece"}},
    ],
)
def test_j04_a_wild_tokenizer_is_an_error_of_ours(wild: dict[str, Any]) -> None:
    """Whatever the library makes of it, a panic included; and no id makes a table of its own size."""
    spec = json.loads(tiny_bundle().tokenizer_json) | wild
    with pytest.raises(BaruError):
        assert Tokenizer(TokenizerBundle(json.dumps(spec))).vocabulary.size


def test_j04_a_panic_of_the_library_is_an_error_of_ours() -> None:
    """A merge that is longer than its prefix: found by fuzzing; no `Exception` comes of it."""
    model = {"type": "BPE", "vocab": {"H": 1, "l": 3}, "merges": [["l", "H"]], "continuing_subword_prefix": "loooong"}
    spec = json.loads(tiny_bundle().tokenizer_json) | {"model": model}
    with pytest.raises(TokenizerMismatch, match="cannot be used"):
        Tokenizer(TokenizerBundle(json.dumps(spec)))


@pytest.mark.parametrize("wild", [{"padding": 10**9}, {"truncation": 1}])
def test_j04_a_prompt_is_neither_cut_nor_filled_up(wild: dict[str, int]) -> None:
    """Whatever the file says: an id more or less would be another prompt, a milliard of them the end of the node."""
    padding = {"strategy": {"Fixed": wild.get("padding")}, "direction": "Right", "pad_to_multiple_of": None,
               "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": wild.get("truncation"), "strategy": "LongestFirst", "stride": 0}
    both = {"padding": padding, "truncation": truncation}
    spec = json.loads(tiny_bundle().tokenizer_json) | {name: both[name] for name in wild}
    expected = Tokenizer(tiny_bundle()).encode_text("hello there")
    assert Tokenizer(TokenizerBundle(json.dumps(spec))).encode_text("hello there") == expected


def test_j04_the_process_that_renders_has_no_more_than_it_needs() -> None:
    """Neither our packages nor those of a model: a way out of the sandbox finds little there."""
    source = (_ROOT / "common/baru_common/tokens/chat_template.py").read_text()
    assert "import baru" not in source
    assert "from baru" not in source


def test_j04_a_head_of_a_link_is_refused(tmp_path: Path) -> None:
    head, elsewhere = tmp_path / "head", tmp_path / "else.safetensors"
    head.mkdir()
    (head / "config.json").write_text("{}")
    save_file({}, elsewhere)
    (head / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(ModelFileError, match="leads out of"):
        read_folder(str(head))
