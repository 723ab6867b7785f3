"""This package is what administrators do with a cluster, as methods that return values.

`admin.py` has the `Admin` that users have (`sluice.aio.Admin`; `sluice.Admin` is its blocking
face). `sluice admin` is flags and printing around the same methods. Each other module is one
subject: topics, groups, offsets, messages, brokers, and what only Sluice's brokers tell (dead
letters, delayed messages, open transactions). `values.py` has what they return, `everywhere.py`
does one thing in many places.
"""
