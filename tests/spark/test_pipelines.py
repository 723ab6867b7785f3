"""The ready pipelines on a real SparkSession; what they must say is counted here in plain Python.

The broker runs in this process, with a clock of its own: hours of orders are sent in a moment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from sluice import Message, tables
from sluice.errors import ConfigError, PipelineFailed
from sluice.pipelines import files, generating, needs, running
from sluice.pipelines.ready import logs
from sluice.pipelines.settings import Settings, read_values
from sluice.pipelines.traffic import json_event
from sluice.testing.clock import Clock
from sluice.testing.site import LiveBroker
from tests.spark.kit import forget_last_commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.filterwarnings("ignore")

MINUTE_MS = 60_000
DAY_MS = 1440 * MINUTE_MS


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """The shared session with what the command would set, as far as that can be set later."""
    wanted = {"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "1"}
    before = {name: spark.conf.get(name) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    yield spark
    for name, kept in before.items():
        assert kept is not None
        spark.conf.set(name, kept)


def run(
    session: SparkSession, broker: LiveBroker, target: str, place: Path, *given: str
) -> running.Outcome:
    """Handle all that is there, as `sluice pipeline run` does."""
    pipeline = files.find(target)
    values = read_values(pipeline.name, pipeline.defaults, given)
    settings = Settings(pipeline.name, broker.nameserver_address, values)
    way = running.Way(str(place), is_once=True)
    return running.run(session, pipeline, settings, way, threading.Event(), lambda *_: None)


def need_spark() -> None:
    lacks = needs.missing(os.environ)
    if lacks:
        pytest.skip(f"Spark cannot run here: {lacks}")


def bodies(broker: LiveBroker, topic: str) -> list[Any]:
    return [json.loads(message.body) for message in broker.messages(topic)]


def send(broker: LiveBroker, name: str, count: int, start_ms: int, rate: float) -> None:
    stream = generating.events(name, seed=3, start_ms=start_ms, rate=rate, count=count)
    producer = broker.producer(batching=True)
    generating.send(producer, stream, threading.Event(), paced=False)


def test_gifts_are_counted_once_on_every_board(
    session: SparkSession, sluice_broker: LiveBroker, tmp_path: Path
) -> None:
    start_ms = int(datetime(2026, 11, 16, 23, 58, 30, tzinfo=UTC).timestamp() * 1000)
    send(sluice_broker, "gifts", 1500, start_ms, 10.0)
    for text in ("{", "7", '{"id":"b","viewer":"v","host":"h","coins":-5,"at":1}'):
        sluice_broker.producer().send(Message("gifts", text, tags="none"))
    outcome = run(session, sluice_broker, "gifts", tmp_path, "late_minutes=1")
    assert (outcome.counts["board"].rows, outcome.lag) == (1503, 0)

    messages = [each for each in sluice_broker.messages("gifts") if each.tags == "gift"]
    found = {gift["id"]: gift for gift in (json.loads(each.body) for each in messages)}
    assert len(found) < 1500, "some came twice"
    wanted: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for gift in found.values():
        for board, length_ms in (("second", 1000), ("minute", MINUTE_MS), ("day", DAY_MS)):
            wanted[board, gift["at"] // length_ms * length_ms][gift["viewer"]] += gift["coins"]
        day = gift["at"] // DAY_MS * DAY_MS
        wanted["share", day][gift["host"]] += 40 * gift["coins"]
    assert len({start for board, start in wanted if board == "day"}) == 2, "over midnight"

    def published() -> dict[tuple[str, int], Counter[str]]:
        shown: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        for line in bodies(sluice_broker, "gift-board"):
            lines = shown[line["board"], line["start"]]
            lines[line["name"]] = max(lines[line["name"]], line["coins"])
        return shown

    def top(lines: Counter[str]) -> list[tuple[str, int]]:
        return sorted(lines.items(), key=lambda line: (-line[1], line[0]))[:10]

    shown = published()
    assert shown.keys() == wanted.keys()
    assert all(top(shown[place]) == top(wanted[place]) for place in wanted)
    # Spark has forgotten what is over: lines whose window ended before the watermark, which it does
    # because of how the column `window` is marked, and gifts that can come again no more.
    over_ms = max(gift["at"] for gift in found.values()) - MINUTE_MS
    lengths_ms = {"second": 1000, "minute": MINUTE_MS, "day": DAY_MS, "share": DAY_MS}
    lines = sum(
        len(wanted[board, start]) for board, start in wanted if start + lengths_ms[board] > over_ms
    )
    known = sum(gift["at"] + MINUTE_MS > over_ms for gift in found.values())
    assert lines + known < sum(map(len, wanted.values())) + len(found)
    assert outcome.counts["board"].state_rows == lines + known
    # A driver that died before it could note its last batch does it again, and publishes it once.
    before = len(sluice_broker.messages("gift-board"))
    forget_last_commit(str(tmp_path / "board"))
    run(session, sluice_broker, "gifts", tmp_path, "late_minutes=1")
    assert len(sluice_broker.messages("gift-board")) == before


def checked(broker: LiveBroker) -> list[tuple[str, str, int | None, int | None]]:
    """What must become of the orders and payments that are there, by the rules of the page."""

    def in_time(topic: str, key: str) -> dict[str, Any]:
        found = {}
        for message in broker.messages(topic):
            event = json.loads(message.body)
            if message.store_ms <= event["at"] + 10 * MINUTE_MS:
                event["time"] = min(event["at"], message.store_ms)
                found[event[key]] = event
        return found

    bought, paid = in_time("orders", "order"), in_time("payments", "payment")
    said: list[tuple[str, str, int | None, int | None]] = []
    settled = set()
    for payment in paid.values():
        order = bought.get(payment["order"])
        if order and 0 <= payment["time"] - order["time"] <= 30 * MINUTE_MS:
            settled.add(order["order"])
            state = "paid" if order["cents"] == payment["cents"] else "wrong amount"
            said.append((order["order"], state, order["cents"], payment["cents"]))
        else:
            said.append((payment["order"], "no order", None, payment["cents"]))
    for name, order in bought.items():
        if name not in settled:
            said.append((name, "unpaid", order["cents"], None))
    return sorted(said, key=str)


@pytest.mark.soak  # two joined streams and what is set aside: many times the work of the gifts
def test_orders_are_reconciled_with_payments(
    session: SparkSession, sluice_broker: LiveBroker, sluice_clock: Clock, tmp_path: Path
) -> None:
    start_ms = sluice_clock.now_ms()
    producer = sluice_broker.producer(batching=True)
    for topic in ("orders", "payments"):
        sluice_broker.create_topic(topic, queues=2)
    stream = generating.events("orders", seed=5, start_ms=start_ms, rate=0.1, count=700)
    minutes: dict[int, list[Any]] = defaultdict(list)
    for event in stream:
        minutes[int(event.after_seconds // 60)].append(event)
    for minute in range(max(minutes) + 1):
        sluice_clock.advance(minutes=1)
        generating.send(producer, iter(minutes[minute]), threading.Event(), paced=False)
    # Later events say that the time of the others is over. Their own is not.
    sluice_clock.advance(hours=3)
    now_ms = sluice_clock.now_ms()
    wanted = checked(sluice_broker)
    last = {"order": "last", "customer": "c", "cents": 1, "at": now_ms}
    generating.send(
        producer,
        iter(
            [
                json_event("orders", last, key="last", after_seconds=0),
                json_event(
                    "payments", {"payment": "p", **last, "order": "x"}, key="x", after_seconds=0
                ),
                json_event("orders", {"order": 1}, key="bad", after_seconds=0),
            ]
        ),
        threading.Event(),
        paced=False,
    )
    run(session, sluice_broker, "orders", tmp_path)
    found = [
        (said["order"], said["state"], said.get("cents"), said.get("paid_cents"))
        for said in bodies(sluice_broker, "orders-checked")
    ]
    assert sorted(found, key=str) == wanted
    assert {state for _, state, _, _ in found} == {"paid", "wrong amount", "unpaid", "no order"}
    aside = Counter((said["fault"], said["topic"]) for said in bodies(sluice_broker, "orders-late"))
    late = sum(
        message.store_ms > json.loads(message.body).get("at", now_ms) + 10 * MINUTE_MS
        for message in sluice_broker.messages("orders")
    )
    assert late
    assert aside == {("late", "orders"): late, ("unreadable", "orders"): 1}


@pytest.mark.soak  # four queries at once
def test_lines_become_rates_sessions_and_an_archive(
    session: SparkSession, sluice_broker: LiveBroker, tmp_path: Path
) -> None:
    start_ms = int(datetime(2026, 11, 16, 9, 0, 30, tzinfo=UTC).timestamp() * 1000)
    send(sluice_broker, "logs", 600, start_ms, 1.0)
    # A line of a later hour: sessions before it are over.
    sluice_broker.producer().send(
        Message("logs", "2026-11-16T12:00:00Z INFO cart user=end 5ms bye")
    )
    path = tmp_path / "files"
    given = (f"archive={path}", "session_minutes=1", "late_minutes=1")
    outcome = run(session, sluice_broker, "logs", tmp_path / "place", *given)
    assert outcome.lag == 0

    lines = [message.body.decode() for message in sluice_broker.messages("logs")]
    good = [match for match in map(re.compile(logs.LINE).match, lines) if match]
    bad = [line for line in lines if not re.match(logs.LINE, line)]
    assert bad
    assert sorted(said["line"] for said in bodies(sluice_broker, "log-bad")) == sorted(bad)
    rates: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    users = defaultdict(list)
    for match in good:
        at_ms = round(datetime.fromisoformat(match[1]).timestamp() * 1000)
        rates[match[3], at_ms // MINUTE_MS * MINUTE_MS][0] += 1
        rates[match[3], at_ms // MINUTE_MS * MINUTE_MS][1] += match[2] == "ERROR"
        users[match[4]].append((at_ms, match[2] == "ERROR"))
    latest = {
        (said["service"], said["start"]): [said["lines"], said["errors"]]
        for said in bodies(sluice_broker, "log-rates")
    }
    assert latest == rates
    sessions: list[tuple[str, int, int, int, int]] = []
    for user in users.keys() - {"end"}:
        groups: list[list[tuple[int, bool]]] = []
        for event in sorted(users[user]):
            if not groups or event[0] >= groups[-1][-1][0] + MINUTE_MS:
                groups.append([])
            groups[-1].append(event)
        for events in groups:
            errors = sum(is_error for _, is_error in events)
            sessions.append((user, events[0][0], events[-1][0], len(events), errors))
    told = [
        (said["user"], said["start"], said["end"], said["lines"], said["errors"])
        for said in bodies(sluice_broker, "log-sessions")
    ]
    assert len(sessions) > len(users), "some came back"
    assert sorted(told) == sorted(sessions)
    archived = tables.read(session, path).collect()
    assert sorted((row.line, row.service) for row in archived) == sorted(
        (match[0], match[3]) for match in good
    )
    assert {str(row.day) for row in archived} == {"2026-11-16"}


def test_a_topic_is_archived(
    session: SparkSession, sluice_broker: LiveBroker, tmp_path: Path
) -> None:
    send(sluice_broker, "archive", 300, 0, 10.0)
    path = tmp_path / "files"
    place = tmp_path / "place"
    for _ in range(2):
        run(session, sluice_broker, "archive", place, f"path={path}")
        rows = tables.read(session, path).collect()
        found = {(row.partition, row.offset): bytes(row.value) for row in rows}
        wanted = {
            (message.queue_id, message.queue_offset): message.body
            for message in sluice_broker.messages("events")
        }
        assert (found, len(rows)) == (wanted, len(wanted))
        assert {(row.topic, row.tag) for row in rows} == {("events", "reading")}
        send(sluice_broker, "archive", 100, 1, 10.0)
    # A driver that died after the table's commit and before its own note.
    forget_last_commit(str(place / "files"))
    run(session, sluice_broker, "archive", place, f"path={path}")
    count = tables.read(session, path).count()
    assert count == len(sluice_broker.messages("events"))


def test_an_archive_with_a_schema_has_fields_and_dead_letters(
    session: SparkSession, sluice_broker: LiveBroker, tmp_path: Path
) -> None:
    send(sluice_broker, "archive", 50, 0, 10.0)
    sluice_broker.producer().send(Message("events", "no reading"))
    path = tmp_path / "files"
    schema = "schema=number INT NOT NULL, sensor STRING, value DOUBLE"
    for _ in range(2):
        run(session, sluice_broker, "archive", tmp_path / "place", f"path={path}", schema)
    rows = tables.read(session, path).collect()
    readings = [each for each in sluice_broker.messages("events") if each.tags == "reading"]
    assert sorted((row.number, row.sensor, row.value) for row in rows) == sorted(
        (said["number"], said["sensor"], said["value"])
        for said in (json.loads(each.body) for each in readings)
    )
    (letter,) = sluice_broker.messages("archive-dead")
    assert letter.body == b"no reading"
    assert letter.properties["reason"].startswith("is no JSON: ")


@pytest.mark.soak  # Spark is started twice
def test_the_command_stops_between_two_batches_and_goes_on_there(
    sluice_broker: LiveBroker, tmp_path: Path
) -> None:
    """`new`, `serve` and Ctrl-C, as on a terminal: the whole group of processes gets the signal."""
    need_spark()
    sluice = [sys.executable, "-m", "sluice", "pipeline"]
    subprocess.run([*sluice, "new", "clicks"], cwd=tmp_path, check=True, capture_output=True)
    producer = sluice_broker.producer()
    for number in range(20):
        producer.send(Message("clicks", "click", keys=f"page-{number % 2}"))
    place = ["clicks.py", "-n", sluice_broker.nameserver_address, "--checkpoint", "place"]
    serving = subprocess.Popen(
        [*sluice, "serve", *place],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        sluice_broker.wait_until(
            lambda: len(sluice_broker.messages("clicks-counts")) >= 2, seconds=300
        )
        os.killpg(serving.pid, signal.SIGINT)
        out, errors = serving.communicate(timeout=300)
    finally:
        serving.kill()
        serving.wait()
    assert (serving.returncode, "Traceback" in errors) == (0, False), errors
    assert re.match(r"clicks: stopped after 20 rows in \d+ batches, .* s, lag \d+\n", out), out
    before = len(sluice_broker.messages("clicks-counts"))
    done = subprocess.run(
        [*sluice, "run", *place], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "clicks: handled 0 rows" in done.stdout
    assert len(sluice_broker.messages("clicks-counts")) == before
    # The test that `new` wrote passes too.
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_clicks.py"], cwd=tmp_path, check=True
    )
    assert Path(tmp_path / "place" / "spark.log").exists()


@pytest.mark.soak
def test_the_story_shows_what_was_sent() -> None:
    need_spark()
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "story", "--seconds", "5"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    last = "1,000 messages, 919 gifts: the boards of Spark are what was sent\n"
    assert last in done.stdout
    assert last in page


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("gifts", "top=0", "--set top=0: at least 1"),
        ("gifts", "late_minutes=-1", "--set late_minutes=-1: at least 0"),
        ("gifts", "share_percent=-5", "--set share_percent=-5: at least 0"),
        ("gifts", "output=gifts", "--set output=gifts: is topic too"),
        ("gifts", "topic=", "--set topic=: name a topic"),
        ("orders", "pay_minutes=0", "--set pay_minutes=0: at least 1"),
        ("orders", "late_minutes=-1", "--set late_minutes=-1: at least 0"),
        ("orders", "payments=orders", "--set payments=orders: is orders too"),
        ("logs", "session_minutes=0", "--set session_minutes=0: at least 1"),
        ("logs", "bad=logs", "--set bad=logs: is topic too"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_query_begins(
    session: SparkSession, sluice_broker: LiveBroker, tmp_path: Path,
    name: str, given: str, words: str,
) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        run(session, sluice_broker, name, tmp_path / "place", given)
    assert not (tmp_path / "place").exists()


def test_what_a_pipeline_does_wrong_is_said_in_one_line(
    session: SparkSession, sluice_broker: LiveBroker, tmp_path: Path
) -> None:
    def wrong(body: str) -> str:
        file = tmp_path / "wrong.py"
        file.write_text(f"def pipeline(spark, settings):\n    {body}\n", encoding="utf-8")
        with pytest.raises((ConfigError, PipelineFailed)) as caught:
            run(session, sluice_broker, str(file), tmp_path / "place")
        text = str(caught.value)
        assert "\n" not in text
        return text

    read = "settings.read(spark, 'nowhere')"
    assert "topic nowhere does not exist" in wrong(f"return settings.write({read}, 'out')")
    assert "returned NoneType for query" in wrong("return None")
    assert "returned no query" in wrong("return []")
    assert "returned DataFrame for a" in wrong(f"return {{'a': {read}}}")
    assert "no setting 'tpoic'" in wrong("settings['tpoic']")
    assert "option colums is not known" in wrong(f"return {read[:-1]}, colums='value')")
    started = ".writeStream.format('noop').start()"
    assert "without start()" in wrong(f"return spark.readStream.format('rate').load(){started}")
