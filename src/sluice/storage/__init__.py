"""This package is one machine's durable log and its indexes.

Files only: no sockets, and of the protocols only the stored record. Code outside of the package
imports `opening` and `store` (for an event loop) or `blocking` (for threads), `files` or
`memory_files` to give them a disk, and `inspect` to print one. The other modules are private to it;
`tests/tidy/test_imports.py` watches.
"""
