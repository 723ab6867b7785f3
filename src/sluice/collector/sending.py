"""This module sends the lines of files as messages, and says what can be tried again.

The lines of one file stay in order: they go to one queue, one batch after the other, and a batch
that got no answer is sent again before the next one. Where its broker is away and another one has
the topic, the file goes on there.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson

from sluice.client.aio.requests import Producer
from sluice.client.core.messages import Message
from sluice.collector.lines import Line
from sluice.collector.places import Place
from sluice.errors import ConfigError, MessageIllegal, MessageInvalid, SendFailed, SluiceError

log_lines = logging.getLogger("sluice.collector")

_AGAIN_SECONDS: Final = 60.0
_KEY_LENGTH_MAX: Final = 256
_TOPIC_LENGTH_MAX: Final = 127
_NOT_IN_TOPICS: Final = re.compile(r"[^%|a-zA-Z0-9_-]+")
_TOPIC_WORDS: Final = ("name", "directory", "host")
_LANES_MAX: Final = 10_000
_WORD: Final = re.compile(r"\{([^{}]*)\}")


class Sender(Protocol):
    """What takes the messages of a portion; it returns when all are acknowledged."""

    async def send(self, topic: str, messages: Sequence[Message], lane: str) -> None:
        """`lane`: messages of one lane stay in order."""


class Shape(NamedTuple):
    """How a line becomes a message."""

    topic: str
    host: str
    tag: str = ""
    key_field: str = ""
    properties: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Refuse what no message can have."""
        words = _WORD.findall(self.topic)
        unknown = [word for word in words if word not in _TOPIC_WORDS]
        if unknown:
            raise ConfigError(
                f"--topic {self.topic}: {{{unknown[0]}}} is not known; there are {{name}}, "
                "{directory} and {host}"
            )
        rest = _WORD.sub("", self.topic)
        if not self.topic or _NOT_IN_TOPICS.search(rest) or len(rest) > _TOPIC_LENGTH_MAX:
            raise ConfigError(f"--topic {self.topic}: letters, digits, - and _, at most 127")
        try:
            properties = {**dict(self.properties), "host": self.host}
            Message("topic", b"body", tags=self.tag, properties=properties)
        except MessageInvalid as error:
            raise ConfigError(str(error)) from error

    def topic_of(self, path: str) -> str:
        """{name} is the file's name up to its first dot, so that rotated files keep the topic."""
        words = {
            "name": os.path.basename(path).lstrip(".").partition(".")[0],
            "directory": os.path.basename(os.path.dirname(path)),
            "host": self.host,
        }
        topic = _WORD.sub(lambda found: words[found[1]], self.topic)
        return _NOT_IN_TOPICS.sub("-", topic)[:_TOPIC_LENGTH_MAX]

    def messages(self, place: Place, lines: Sequence[Line]) -> list[Message]:
        topic = self.topic_of(place.path)
        common = {
            **dict(self.properties),
            "path": _printable(place.path),
            "host": self.host,
            "file": place.file,
        }
        return [self._message(topic, common, line) for line in lines]

    def _message(self, topic: str, common: dict[str, str], line: Line) -> Message:
        properties = {**common, "offset": str(line.offset)}
        if line.part:
            properties["part"] = str(line.part)
        # What `check` has seen, or `_printable` made, is not checked again for every line.
        message = Message(topic, line.body)
        message.tags = self.tag
        message.keys = _key(line.body, self.key_field) if self.key_field else ""
        message.properties = properties
        return message


def _printable(path: str) -> str:
    """A path as text: what is no text in it, or would not be shown, is written as \\x.."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _key(body: bytes, field: str) -> str:
    """The value of a field, where the line is a JSON object that has it; else nothing."""
    if not body.startswith(b"{"):
        return ""
    try:
        value: Any = orjson.loads(body).get(field)
    except orjson.JSONDecodeError:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    key = str(value)
    return key if len(key) <= _KEY_LENGTH_MAX and key.isprintable() else ""


class ProducerSender:
    """Sends through Sluice's own client."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._avoided: dict[str, str] = {}  # lane -> a broker that failed

    async def send(self, topic: str, messages: Sequence[Message], lane: str) -> None:
        queues = await self._producer.queues(topic)
        avoided = self._avoided.get(lane, "")
        queues = tuple(q for q in queues if q.broker_name != avoided) or queues
        queue = queues[zlib.crc32(lane.encode()) % len(queues)]
        try:
            await self._producer.send_batch(messages, queue=queue)
        except SluiceError as error:
            if not is_hopeless(error):
                if len(self._avoided) >= _LANES_MAX:
                    self._avoided.clear()
                self._avoided[lane] = queue.broker_name
            raise


def is_hopeless(error: SluiceError) -> bool:
    """Whether these messages will never be taken as they are."""
    return isinstance(error, MessageInvalid | MessageIllegal)


class Outages:
    """What is said of topics that nobody takes messages for, and when it is given up.

    A topic's first failure is a line in the log, then one each minute, then one when it is over.
    """

    def __init__(self, give_up_seconds: float, now: Callable[[], float]) -> None:
        self._give_up_seconds = give_up_seconds
        self._now = now
        self._since: dict[str, tuple[float, float]] = {}  # topic -> began, said last

    def failed(self, topic: str, error: SluiceError) -> None:
        """A send failed; raises SendFailed where that goes on for too long."""
        now = self._now()
        began, said = self._since.setdefault(topic, (now, -_AGAIN_SECONDS))
        away = now - began
        if self._give_up_seconds and away >= self._give_up_seconds:
            raise SendFailed(f"gave up after {away:.0f} s without a broker: {error}") from error
        if now - said >= _AGAIN_SECONDS:
            self._since[topic] = (began, now)
            log_lines.warning(
                "no broker takes messages of %s for %.0f s now; reading waits for one: %s",
                *(topic, away, error),
            )

    def sent(self, topic: str) -> None:
        """A send was acknowledged."""
        began, _ = self._since.pop(topic, (None, 0.0))
        if began is not None:
            log_lines.warning(
                "messages of %s are taken again after %.1f s; reading goes on",
                *(topic, self._now() - began),
            )
