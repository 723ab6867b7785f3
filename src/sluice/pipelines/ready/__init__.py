"""This package holds the ready pipelines. Each is one module: the settings, `pipeline(spark,
settings)`, and `traffic(seed, start_ms, rate)`, which makes messages for it, the same ones for the
same seed.
"""
