"""This package measures Sluice beside its peers; `python -m bench` lists what there is.

`harness` holds figures, rounds and output, `limits` the plain system calls that nothing can beat,
and each other module one benchmark. Nothing under `src/` may import it.
"""
