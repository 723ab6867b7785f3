"""This module is the folder of programs that load a broker with one client each.

Each runs in a process and a Python of its own: `python -m bench.clients.NAME JOB`, where the job
is what `loads.Job` reads. It prints one line of JSON at its end.
"""
