"""This module says what a machine lacks for Spark, before anything slow is started.

Nothing here imports pyspark: whoever has none of it is to read one line and no traceback.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from sluice.errors import ConfigError

JAVA_VERSION_MIN: Final = 17
_ANSWER_SECONDS: Final = 60
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas")


def missing(environ: Mapping[str, str]) -> str:
    """What is missing to run Spark here, and what to do; empty where nothing is."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; pip install 'sluice-mq[spark]'"
    return _missing_java(environ)


def require(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where Spark cannot run."""
    text = missing(environ)
    if text:
        raise ConfigError(f"Spark cannot run here: {text}")


def _missing_java(environ: Mapping[str, str]) -> str:
    wanted = f"install a Java of version {JAVA_VERSION_MIN} or newer"
    home = environ.get("JAVA_HOME", "")
    if home:
        java = shutil.which(os.path.join(home, "bin", "java"))
        if java is None:
            return f"JAVA_HOME is {home}, and there is no bin/java in it; {wanted}"
    else:
        java = shutil.which("java", path=environ.get("PATH"))
        if java is None:
            return f"there is no Java; {wanted}, or set JAVA_HOME to one"
    version = _java_version(java)
    if version is None:
        return f"{java} does not tell its version; {wanted}"
    if version < JAVA_VERSION_MIN:
        return f"{java} is Java {version}; {wanted}, or set JAVA_HOME to one"
    return ""


def _java_version(java: str) -> int | None:
    try:
        done = subprocess.run(  # noqa: S603 (the Java that Spark itself would start)
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rb'version "(?:1\.)?(\d{1,4})', done.stdout)
    return int(found[1]) if found else None
