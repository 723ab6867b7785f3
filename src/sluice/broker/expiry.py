"""This module ends the life of messages: what has a time to live is not handed out after it.

The time comes from the message (MSG_TTL_MS) or from its topic (message.ttl.ms) and begins when the
broker takes the message, whatever the producer's clock says. It is written down as a time in a
property of the broker's own, which copies of the message keep (delayed, committed, tried again),
and from there into the queue entry (`protocol/lifetimes.py`): reads pass over what is over without
looking at it. Dead letters do not end: they are there to be looked at.

Queues of topics that never had such a message are read as ever. The store's table `expiry` has the
others; the line is in the log before the topic's first message with an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sluice.broker.attributes import MESSAGE_TTL, TTL_MS_MAX
from sluice.broker.priorities import without
from sluice.broker.topics import DEAD_PREFIX, RETRY_PREFIX, TopicSettings
from sluice.errors import MessageIllegal, SluiceError
from sluice.model import Message, PropertyFilter
from sluice.protocol import lifetimes, records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.storage.state import EXPIRY_TABLE

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

TTL_NAME: Final = b"MSG_TTL_MS"

Accept = Callable[[int], bool] | PropertyFilter


class Watch:
    """A read of a topic whose messages may end: what it tests, and how many it passed over."""

    __slots__ = ("_expired", "_expiry", "_topic")

    def __init__(self, expiry: Expiry, topic: str) -> None:
        self._expiry = expiry
        self._topic = topic
        self._expired = 0

    def test(self, wants: Accept | None) -> Accept:
        """What to ask the store for now, in place of what the consumer wants."""
        self._expired = 0
        alive_from = self._expiry.alive_from()
        if isinstance(wants, PropertyFilter):
            return self._by_properties(wants, alive_from)
        by_tag, least = wants, lifetimes.LEAST

        def test(tags_code: int) -> bool:
            if least <= tags_code < alive_from:
                self._expired += 1
                return False
            return by_tag is None or by_tag(tags_code)

        return test

    def _by_properties(self, wants: PropertyFilter, alive_from: int) -> PropertyFilter:
        def test(data: bytes) -> bool:
            if EXPIRES_NAME in data:
                when_ms = lifetimes.read_ms(records.property_value(data, EXPIRES_NAME))
                if when_ms is not None and lifetimes.code_of(when_ms) < alive_from:
                    self._expired += 1
                    return False
            return wants.test(data)

        return PropertyFilter(test, wants.steps + 1)

    def done(self) -> None:
        """The read is answered."""
        if self._expired:
            self._expiry.passed_over[self._topic] += self._expired
            self._expired = 0


class Expiry:
    """The times to live of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._marked = set(core.store.table(EXPIRY_TABLE))
        self.passed_over: Counter[str] = Counter()  # by topic: messages that were not handed out

    # -------------------------------------------------------------------------------------- sending

    def stamped(self, topic: str, settings: TopicSettings, properties: bytes) -> bytes:
        """Properties with the end of the message's life, where it has one; refuses bad ones."""
        is_again = topic.startswith((RETRY_PREFIX, DEAD_PREFIX))
        ttl_ms = None if is_again else self._ttl_ms(settings, properties)
        if ttl_ms is not None:
            if EXPIRES_NAME in properties:  # of a message that somebody read and sends on
                properties = without(properties, EXPIRES_NAME)
            elif properties and properties[-1] != 2:
                properties += b"\x02"
            properties += EXPIRES_NAME + b"\x01%d\x02" % (self._core.now_ms() + ttl_ms)
        elif EXPIRES_NAME in properties:
            text = records.property_value(properties, EXPIRES_NAME)
            if text is None:
                return properties
            if lifetimes.read_ms(text) is None:
                raise MessageIllegal(
                    f"{EXPIRES_NAME.decode()} is the broker's own, and {text[:50]!r} is no time; "
                    f"send the message without it, or with {TTL_NAME.decode()}"
                )
        else:
            return properties
        self._mark(topic)
        return properties

    @staticmethod
    def _ttl_ms(settings: TopicSettings, properties: bytes) -> int | None:
        text = records.property_value(properties, TTL_NAME) if TTL_NAME in properties else None
        if text is None:
            default = settings.attributes.get(MESSAGE_TTL) if settings.attributes else None
            return None if default is None else int(default)
        if not text.isdigit() or len(text) > 19 or not 1 <= int(text) <= TTL_MS_MAX:
            raise MessageIllegal(
                f"{TTL_NAME.decode()} is {text[:50].decode('utf-8', 'replace')!r}; allowed: 1 to "
                f"{TTL_MS_MAX} milliseconds"
            )
        return int(text)

    def outliving(self, stored: Message) -> Message:
        """What is stored for a message that may wait for its time; refuses one that ends first."""
        topic = stored.topic.encode()
        if EXPIRES_NAME not in stored.properties or topic not in records.TIMED_TOPICS:
            return stored
        levels_ms = self._core.store.config.delay_levels_ms
        due_ms = records.tags_code(topic, stored.properties, self._core.now_ms(), levels_ms)
        ends_ms = lifetimes.read_ms(records.property_value(stored.properties, EXPIRES_NAME))
        if ends_ms is not None and due_ms >= ends_ms:
            raise MessageIllegal(
                f"the message would be delivered {due_ms - self._core.now_ms()} ms from now, but "
                f"its time to live is over {ends_ms - self._core.now_ms()} ms from now; make "
                f"{TTL_NAME.decode()} longer than the delay"
            )
        return stored

    def _mark(self, topic: str) -> None:
        """From now on reads of the topic look for ends; the log says so before the message."""
        if topic in self._marked or (topic.startswith(RETRY_PREFIX) and self._marked):
            return

        def told(error: SluiceError | None) -> None:
            if error is not None:
                self._marked.discard(topic)

        self._core.store.change([(EXPIRY_TABLE, topic, 1)], told)
        self._marked.add(topic)
        self._core.ask_turn()

    # -------------------------------------------------------------------------------------- reading

    def has_ends(self, topic: str) -> bool:
        """Whether messages of a topic may have an end; copies of any may be in a retry topic."""
        if topic.startswith(RETRY_PREFIX):
            return bool(self._marked)
        return topic in self._marked and not topic.startswith(DEAD_PREFIX)

    def watch(self, topic: str) -> Watch | None:
        """For a read of a topic; None where nothing there ends."""
        return Watch(self, topic) if self.has_ends(topic) else None

    def alive_from(self) -> int:
        return lifetimes.alive_from(self._core.now_ms())
