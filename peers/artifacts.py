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
    is_alone: bool = False  # without what it depends on

    def pom(self) -> str:
        """What a pom says of it."""
        rest = ""
        if self.is_alone:
            every = "<groupId>*</groupId><artifactId>*</artifactId>"
            rest = f"<exclusions><exclusion>{every}</exclusion></exclusions>"
        return (
            "    <dependency>"
            f"<groupId>{escape(self.group)}</groupId>"
            f"<artifactId>{escape(self.name)}</artifactId>"
            f"<version>{escape(self.version)}</version>"
            f"{rest}</dependency>"
        )


@dataclass(frozen=True, slots=True)
class ArtifactSet:
    """A named list of artifacts that make one class path, with all they depend on."""

    name: str
    artifacts: tuple[Artifact, ...]

    def pom(self) -> str:
        """The pom that makes Maven resolve this set."""
        dependencies = "\n".join(artifact.pom() for artifact in self.artifacts)
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
# What applications that process records are built on.
KAFKA_STREAMS = ArtifactSet(
    "kafka-streams-4.3.0",
    (
        Artifact("org.apache.kafka", "kafka-streams", "4.3.0"),
        Artifact("org.slf4j", "slf4j-simple", "1.7.36"),
    ),
)
# The older of the two clients that most applications have; Spark embeds it.
KAFKA_CLIENT_3 = ArtifactSet(
    "kafka-clients-3.9.1",
    (
        Artifact("org.apache.kafka", "kafka-clients", "3.9.1"),
        Artifact("org.slf4j", "slf4j-simple", "1.7.36"),
    ),
)
# 3.9.3 loses data (ZOOKEEPER-4925); never pick it.
ZOOKEEPER = ArtifactSet(
    "zookeeper-3.9.6", (Artifact("org.apache.zookeeper", "zookeeper", "3.9.6"),)
)

# Spark's own Kafka source, for the PySpark that requirements/spark.txt pins. Of one of its parts no
# release of the same version was published, so what is needed is named, and Spark has the rest.
SPARK_KAFKA = ArtifactSet(
    "spark-kafka-4.2.0",
    (
        Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0", is_alone=True),
        Artifact(
            "org.apache.spark",
            "spark-token-provider-kafka-0-10_2.13",
            "4.1.0-preview1",
            is_alone=True,
        ),
        Artifact("org.apache.kafka", "kafka-clients", "3.9.2", is_alone=True),
        Artifact("org.apache.commons", "commons-pool2", "2.13.1", is_alone=True),
    ),
)
# For tests of tables, on the PySpark that requirements/spark.txt pins.
DELTA_PYSPARK = "4.2."
DELTA = ArtifactSet("delta-spark-4.4.0", (Artifact("io.delta", "delta-spark_4.2_2.13", "4.4.0"),))

ARTIFACT_SETS = {
    row.name: row for row in (ROCKETMQ, ROCKETMQ_CLIENT_4, KAFKA, KAFKA_CLIENT_3, ZOOKEEPER)
}
