"""This module is where Spark finds the data source `sluice`: it looks into every top-level module
whose name begins with `pyspark_` for a `DefaultSource`. It is imported in every session of an
environment that has it, so it imports little.
"""

from sluice.spark.source import SluiceSource as DefaultSource

__all__ = ["DefaultSource"]
