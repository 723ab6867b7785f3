"""This module is the table of what each peer is made of, as Maven coordinates.

A row is data: adding a peer or a version needs no code. The folder of jars is cached under the
hash of the pom that a row becomes, so a changed row is simply another folder.
"""

import hashlib
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Pinned, because an unpinned plugin is whatever the installed Maven happens to prefer.
COPY_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One Maven coordinate."""

    group: str
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class ArtifactSet:
    """A named list of artifacts that make one class path, with all they depend on."""

    name: str
    artifacts: tuple[Artifact, ...]

    def pom(self) -> str:
        """The pom that makes Maven resolve this set."""
        dependencies = "\n".join(
            "    <dependency>"
            f"<groupId>{escape(artifact.group)}</groupId>"
            f"<artifactId>{escape(artifact.name)}</artifactId>"
            f"<version>{escape(artifact.version)}</version>"
            "</dependency>"
            for artifact in self.artifacts
        )
        return (
            "<project>\n"
            "  <modelVersion>4.0.0</modelVersion>\n"
            "  <groupId>sluice.peers</groupId>\n"
            f"  <artifactId>{escape(self.name)}</artifactId>\n"
            "  <version>1</version>\n"
            f"  <dependencies>\n{dependencies}\n  </dependencies>\n"
            "</project>\n"
        )

    def key(self) -> str:
        """Name of the cache folder: readable, and different whenever the pom is."""
        digest = hashlib.sha256((self.pom() + COPY_PLUGIN).encode()).hexdigest()
        return f"{self.name}-{digest[:16]}"


def _rocketmq(version: str, *names: str) -> tuple[Artifact, ...]:
    return tuple(Artifact("org.apache.rocketmq", name, version) for name in names)


ROCKETMQ = ArtifactSet(
    "rocketmq-5.5.0",
    _rocketmq("5.5.0", "rocketmq-broker", "rocketmq-namesrv", "rocketmq-tools", "rocketmq-example"),
)
# For clients that speak gRPC; in its cluster mode it works with any broker.
ROCKETMQ_PROXY = ArtifactSet("rocketmq-proxy-5.5.0", _rocketmq("5.5.0", "rocketmq-proxy"))
ROCKETMQ_CLIENT_4 = ArtifactSet("rocketmq-client-4.9.8", _rocketmq("4.9.8", "rocketmq-client"))
KAFKA = ArtifactSet(
    "kafka-4.3.0",
    (
        Artifact("org.apache.kafka", "kafka_2.13", "4.3.0"),
        Artifact("org.apache.kafka", "kafka-tools", "4.3.0"),
        Artifact("org.slf4j", "slf4j-simple", "1.7.36"),
    ),
)
# 3.9.3 loses data (ZOOKEEPER-4925); never pick it.
ZOOKEEPER = ArtifactSet(
    "zookeeper-3.9.6", (Artifact("org.apache.zookeeper", "zookeeper", "3.9.6"),)
)

ARTIFACT_SETS = {row.name: row for row in (ROCKETMQ, ROCKETMQ_CLIENT_4, KAFKA, ZOOKEEPER)}
