"""This package runs the real brokers that Sluice is compared with: Apache RocketMQ first.

`artifacts` says what a peer is made of, `fetch` brings it into a cache folder, `java` compiles
and runs our small Java programs against it, `process` starts and ends one program, `rocketmq` is
a whole name server and broker. Tests and benchmarks use it; nothing under `src/` may import it.

Everything binds to loopback, every wait has a limit, and a peer that cannot be had raises
`PeerUnavailable` with the reason, which a test turns into a visible skip.
"""

from peers.artifacts import ARTIFACT_SETS, Artifact, ArtifactSet
from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import Jars, cache_directory, fetch
from peers.java import JavaPrograms, RunningProgram
from peers.rocketmq import RocketMQ

__all__ = [
    "ARTIFACT_SETS",
    "Artifact",
    "ArtifactSet",
    "Jars",
    "JavaPrograms",
    "PeerFailed",
    "PeerUnavailable",
    "RocketMQ",
    "RunningProgram",
    "cache_directory",
    "fetch",
]
