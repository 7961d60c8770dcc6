"""`module:factory` on the command line → the user's own callable, and `name=value` → its arguments."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from completep.errors import UserError, some

EXAMPLE = "write package.module:factory or path/to/file.py:factory"


def load_factory(target: str) -> Callable[..., Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{target!r} names no factory", fix=EXAMPLE)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        have = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{place} has no callable {name!r}", fix=f"it has: {some(have) or 'none'}")
    loaded: Callable[..., Any] = found
    return loaded


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"there is no file {path}", fix=EXAMPLE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    _run(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _from_name(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return _run(lambda: importlib.import_module(name), name)


def _run(load: Callable[[], Any], what: str) -> Any:
    try:
        return load()
    except Exception as error:
        raise UserError(
            f"cannot import {what}: {type(error).__name__}: {error}",
            fix="run it on its own with python to see the whole trace; " + EXAMPLE,
        ) from error


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """`width=1024 tied=True name=x` → keyword arguments, read as Python literals where they are."""
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{word!r} is not an argument", fix="write name=value, for instance width=1024")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def call_factory(factory: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except UserError:
        raise
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
        name = getattr(factory, "__name__", "factory")
        raise UserError(
            f"{name}({given}) failed: {type(error).__name__}: {error}",
            fix="check the names and values of the arguments",
        ) from error
