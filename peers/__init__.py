"""This package runs the real brokers that Sluice is compared with: Apache RocketMQ first.

`artifacts` says what a peer is made of, `fetch` brings it into a cache folder, `java`, `go` and
`node` run our small programs with it, `python` brings another version of a package, `debian` finds
a command, `archives` lets Java start sooner, `programs` runs programs and reads their events,
`process` starts and ends one server, `tie` lets both die with the test run, `rocketmq` and `kafka`
are whole brokers. Tests and benchmarks use it; nothing under `src/` may import it.

Everything binds to loopback, every wait has a limit, and a peer that cannot be had raises
`PeerUnavailable` with the reason, which a test turns into a visible skip.
"""

from peers.artifacts import ARTIFACT_SETS, Artifact, ArtifactSet
from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import Jars, cache_directory, fetch
from peers.go import GoPrograms
from peers.java import JavaPrograms
from peers.programs import RunningProgram
from peers.rocketmq import RocketMQ

__all__ = [
    "ARTIFACT_SETS",
    "Artifact",
    "ArtifactSet",
    "GoPrograms",
    "Jars",
    "JavaPrograms",
    "PeerFailed",
    "PeerUnavailable",
    "RocketMQ",
    "RunningProgram",
    "cache_directory",
    "fetch",
]
