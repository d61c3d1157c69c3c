"""Finds, in Python source, what would let bytes or files that somebody sent become code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
_BUILTINS = {"eval", "exec", "compile", "__import__"}
_ATTRIBUTES = {"recv_pyobj", "loads_pickle"}
_SHELLS = {("os", "system"), ("os", "popen"), ("asyncio", "create_subprocess_shell"), ("subprocess", "getoutput")}
_EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104


def findings(source: str) -> Iterator[str]:
    """Yield "line: what" for each."""
    for node in ast.walk(ast.parse(source)):
        for what in _of(node):
            yield f"{getattr(node, 'lineno', 0)}: {what}"


def scan(*folders: Path) -> list[str]:
    """Return "file:line: what" of all Python files below these folders."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert paths
    return [f"{path}:{found}" for path in paths for found in findings(path.read_text())]


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names if name.name.split(".")[0] in _MODULES)
    elif isinstance(node, ast.ImportFrom):
        if (node.module or "").split(".")[0] in _MODULES:
            yield node.module or ""
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and node.value.startswith(_EVERYWHERE):
            yield f"listens on {node.value}"
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    function = node.func
    options = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else ... for k in node.keywords}
    if isinstance(function, ast.Name) and function.id in _BUILTINS:
        yield function.id
    if options.get("shell", False) is not False:
        yield "shell"
    if options.get("trust_remote_code", False) is not False:
        yield "trust_remote_code"
    if options.get("allow_pickle", False) is not False:
        yield "allow_pickle"
    if not isinstance(function, ast.Attribute):
        return
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr in _ATTRIBUTES or (owner, function.attr) in _SHELLS:
        yield function.attr
    if owner == "torch" and function.attr == "load" and options.get("weights_only") is not True:
        yield "torch.load"
    if owner == "yaml" and function.attr in ("load", "unsafe_load", "full_load", "load_all"):
        yield "yaml"
