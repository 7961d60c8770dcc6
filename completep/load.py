"""`module:factory` → your own callable, and `name=value` words → its arguments."""

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from completep.errors import UserError, some

T = TypeVar("T")
EXAMPLE = "write package.module:factory or path/to/file.py:factory"
_FILES: dict[Path, tuple[int, ModuleType]] = {}  # resolved path → (time of its last change in ns, its module)


def load_object(target: str) -> object:
    """The object that `module:name` or `file.py:name` names.

    A file is executed once per process, and again after it has changed.
    """
    place, name, module, value = _find(target)
    if value is None:
        public = [n for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, ModuleType)]
        raise UserError(f"{place} has no {name!r}", fix=_instead(public))
    return value


def load_factory(target: str) -> Callable[..., Any]:
    """Like `load_object`, for a callable."""
    place, name, module, value = _find(target)
    if not callable(value):
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{place} has no callable {name!r}", fix=_instead(callables))
    factory: Callable[..., Any] = value
    return factory


def _instead(names: list[str]) -> str:
    return f"use one of {some(names)}" if names else "define it there, or name another file"


def _find(target: str) -> tuple[str, str, ModuleType, object]:
    """(place, name, module, value) of `place:name`. The value is None if the module does not have the name."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{target!r} does not name a factory", fix=EXAMPLE)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return place, name, module, value


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no file {path}", fix=EXAMPLE)
    file = path.resolve()
    changed = file.stat().st_mtime_ns
    if file in _FILES:
        known_change, module = _FILES[file]
        if known_change == changed:
            return module
        module = _execute(file, module.__name__, str(path))
    elif _is_of(file, sys.modules.get(file.stem)):
        module = sys.modules[file.stem]
    else:
        module = _execute(file, _free_name(file), str(path))
    _FILES[file] = changed, module
    return module


def _is_of(file: Path, module: ModuleType | None) -> bool:
    """Was this module imported from this file already, for instance by unpickling one of its classes?"""
    source = getattr(module, "__file__", None)
    return source is not None and Path(source).resolve() == file


def _free_name(file: Path) -> str:
    """The stem, by which worker processes can import the file too; or a private name if the stem is taken."""
    if file.stem not in sys.modules and file.stem not in sys.stdlib_module_names:
        return file.stem
    return f"_completep_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _execute(file: Path, name: str, what: str) -> ModuleType:
    """Execute a file as a module. It is in sys.modules meanwhile, where pickle and dataclasses look for it."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        # Without the import system: its bytecode cache misses a change within a second that keeps the size.
        _run(lambda: exec(compile(file.read_bytes(), str(file), "exec"), vars(module)), what)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _from_name(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return _run(lambda: importlib.import_module(name), name)


def _run(load: Callable[[], T], what: str) -> T:
    try:
        return load()
    except Exception as error:
        raise UserError(
            f"cannot import {what}: {type(error).__name__}: {error}",
            fix="run it on its own with python to see the whole traceback; " + EXAMPLE,
        ) from error


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """`width=1024 tied=True name=x` → keyword arguments. A value that is not a Python literal stays a string."""
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{word!r} is not an argument", fix="write name=value, for instance width=1024")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two for nesting without end
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
