"""This module brings pyarrow to the others, or says how to get it: the broker does without it."""

from __future__ import annotations

from sluice.errors import ConfigError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.fs as filesystems
    import pyarrow.parquet as parquet
except ModuleNotFoundError as missing:
    raise ConfigError(
        "sluice record and sluice replay need pyarrow: pip install 'sluice-mq[replay]'"
    ) from missing

__all__ = ["filesystems", "pa", "parquet", "pc"]
