"""This module records into a bucket and replays out of it: S3Proxy, which checks every signature.

S3Proxy is fetched with Maven; without it the tests are skipped and say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest

from peers import PeerUnavailable, fetch
from peers.artifacts import Artifact, ArtifactSet
from peers.java import SHORT_LIVED, java_command
from peers.process import PeerProcess, free_ports
from sluice import Message, Producer
from sluice.testing import LiveBroker
from tests.unit.client.admin_kit import sluice

S3PROXY = ArtifactSet("s3proxy-2.7.0", (Artifact("org.gaul", "s3proxy", "2.7.0"),))
START_SECONDS = 180.0
USER, SECRET = "recorder", "a-secret-that-is-never-shown"
BUCKET = "traffic"


class Bucket:
    """A bucket of a server that wants its requests signed."""

    def __init__(self, directory: Path, class_path: str) -> None:
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        (directory / "buckets" / BUCKET).mkdir(parents=True)
        settings = {
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.endpoint": f"http://{self._address}",
            "s3proxy.identity": USER,
            "s3proxy.credential": SECRET,
            "s3proxy.ignore-unknown-headers": "true",  # x-amz-api-version is one
            "jclouds.provider": "filesystem-nio2",
            "jclouds.identity": USER,
            "jclouds.credential": SECRET,
            "jclouds.filesystem.basedir": str(directory / "buckets"),
        }
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        (directory / "s3proxy.conf").write_text(lines, encoding="utf-8")
        words = ["-cp", class_path, "org.gaul.s3proxy.Main", "--properties"]
        self.process = PeerProcess(
            "s3proxy",
            [java_command(), *SHORT_LIVED, *words, str(directory / "s3proxy.conf")],
            log=directory / "s3proxy.log",
        )
        self.process.wait_ready("Started", START_SECONDS)

    def address(self, path: str) -> str:
        options = f"endpoint_override={self._address}&scheme=http&region=us-east-1"
        return f"s3://{BUCKET}/{path}?{options}"

    def names(self, path: str) -> list[str]:
        """The files of a folder, asked for with the right keys."""
        files = pyarrow.fs.S3FileSystem(
            access_key=USER,
            secret_key=SECRET,
            endpoint_override=self._address,
            scheme="http",
            region="us-east-1",
        )
        found = files.get_file_info(pyarrow.fs.FileSelector(f"{BUCKET}/{path}"))
        return sorted(each.base_name for each in found)

    def put(self, path: str, content: bytes) -> None:
        files, base = pyarrow.fs.FileSystem.from_uri(self.address(path))
        with files.open_output_stream(base) as stream:
            stream.write(content)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    try:
        java_command()
        jars = fetch(S3PROXY)
    except PeerUnavailable as error:
        pytest.skip(f"S3Proxy cannot be had: {error.reason}")
    found = Bucket(tmp_path_factory.mktemp("s3"), jars.class_path)
    with found.process:
        yield found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveBroker]:
    running = LiveBroker(tmp_path_factory.mktemp("broker"))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: LiveBroker) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAMESRV_ADDR", broker.nameserver_address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # S3Proxy does not know the checksums behind a body that AWS's library sends by default.
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    return tmp_path


def fill(broker: LiveBroker, topic: str, first: int, stop: int) -> None:
    with Producer(broker.nameserver_address) as producer:
        for number in range(first, stop):
            producer.send(Message(topic, f"order {number}", keys=f"k{number}"))


def bodies(broker: LiveBroker, topic: str) -> list[tuple[int, bytes, str]]:
    """Queue by queue, in order."""
    found = sorted(broker.messages(topic), key=lambda each: (each.queue_id, each.queue_offset))
    return [(each.queue_id, each.body, each.keys) for each in found]


def test_a_bucket_holds_a_recording_that_goes_on_and_is_replayed(
    bucket: Bucket, broker: LiveBroker, here: Path
) -> None:
    broker.create_topic("rush", queues=3)
    fill(broker, "rush", 0, 30)
    place = bucket.address("kept/friday")
    done = sluice("record", "rush", "--to", place)
    assert done.status == 0, done
    assert done.out.endswith("the recording has 30 in 1 files\n")
    fill(broker, "rush", 30, 50)
    # What a recorder left that was killed: no part of the recording.
    bucket.put("kept/friday/part-000002.parquet", b"half")
    bucket.put("kept/friday/.part-000002.parquet.new", b"half")
    done = sluice("record", "rush", "--to", place)
    assert done.status == 0, done
    assert done.out.endswith("the recording has 50 in 2 files\n")
    files = ["manifest.json", "part-000001.parquet", "part-000002.parquet"]
    assert bucket.names("kept/friday") == files
    done = sluice("replay", place, "--speed", "max", "--to", "shadow")
    assert done.status == 0, done
    assert bodies(broker, "rush-shadow") == bodies(broker, "rush")
    assert len(bodies(broker, "rush")) == 50
    report = json.loads((here / "replay-report.json").read_bytes())
    assert SECRET not in json.dumps(report)


def test_a_bucket_that_refuses_is_one_line_without_a_secret(
    bucket: Bucket, broker: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("calm", queues=1)
    fill(broker, "calm", 0, 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-one")
    done = sluice("record", "calm", "--to", bucket.address("calm"))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done
    assert done.err.startswith("sluice: s3://")
    assert "a-wrong-one" not in done.err
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    done = sluice("replay", bucket.address("nothing-here"))
    assert (done.status, done.err.count("\n")) == (2, 1), done
