"""This module finds a pipeline: a Python file with a function `pipeline`, or a ready one by name.

A file is run as the user's own program, with the rights of who runs the command; there is no other
way in which a name becomes code: ready pipelines are a fixed list.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, Final

from sluice.errors import ConfigError
from sluice.pipelines.ready import archive, gifts, logs, orders
from sluice.pipelines.settings import Value

READY: Final = {"gifts": gifts, "orders": orders, "logs": logs, "archive": archive}
FUNCTION: Final = "pipeline"
_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,63}")
# What Python's processes of Spark import; they look beside the file first.
_IMPORTED: Final = frozenset({"numpy", "pandas", "py4j", "pyarrow", "pyspark", "sluice"})
_STACK: Final = re.compile(r"\n\s*(?:at |JVM stacktrace:)")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline as it is written: not yet started."""

    name: str
    function: Callable[..., Any]
    defaults: Mapping[str, Value]
    summary: str


def find(target: str) -> Pipeline:
    """The pipeline of a file or of a name; raises ConfigError."""
    if target in READY:
        return _checked(target, READY[target])
    if not target.endswith(".py") and not os.path.exists(target):
        near = difflib.get_close_matches(target, READY, 1)
        hint = f"did you mean {near[0]}?" if near else f"ready ones are {', '.join(READY)}"
        raise ConfigError(f"{target}: is neither a file nor a ready pipeline; {hint}")
    return _checked(name_of(target), _loaded(target))


def name_of(path: str) -> str:
    """What a pipeline of a file is called; groups and checkpoints are named after it."""
    name = os.path.splitext(os.path.basename(path))[0]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{path}: a pipeline is named after its file, with letters, digits, _ and -; "
            "rename the file"
        )
    check_hides_nothing(name, path)
    return name


def check_hides_nothing(name: str, shown: str) -> None:
    """Raises ConfigError for a file that Spark's processes would import instead of a module."""
    if name in sys.stdlib_module_names or name in _IMPORTED:
        raise ConfigError(f"{shown}: {name} is a module that Spark needs; choose another name")


def _loaded(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such file")
    spec = spec_from_file_location(name_of(path).replace("-", "_"), path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: is no Python file")
    module = module_from_spec(spec)
    # Modules beside the file can be imported, as when it is run by itself.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: {fault(error, path)}") from error
    return module


def fault(error: BaseException, path: str) -> str:
    """What the code of a file raised, in one line."""
    return _where(error, path) + " ".join(_words(error).split())


def _where(error: BaseException, path: str) -> str:
    """The line of the file at which it failed, as far as that is known."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    return f"line {line}: " if line else ""


def _words(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}"
    # An error of Java's has its whole stack in it.
    return _STACK.split(f"{type(error).__name__}: {error}", maxsplit=1)[0]


def _checked(name: str, module: ModuleType) -> Pipeline:
    path = module.__file__ or name
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise ConfigError(
            f"{path}: defines no function {FUNCTION}(spark, settings); "
            "`sluice pipeline new NAME` writes one to begin with"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {FUNCTION}() is called with (spark, settings): {error}"
        ) from None
    defaults = getattr(module, "SETTINGS", {})
    if not isinstance(defaults, dict) or not all(
        isinstance(key, str) and isinstance(value, str | int | float | bool)
        for key, value in defaults.items()
    ):
        raise ConfigError(f"{path}: SETTINGS is no table of names and texts, numbers or booleans")
    summary = (inspect.getdoc(module) or "").partition("\n")[0]
    return Pipeline(name, function, defaults, summary)
