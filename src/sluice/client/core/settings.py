"""This module holds what users may set of a client, checked when the client is made.

Nameservers are found in four ways, the first that says something wins: the argument `nameservers`,
the property `rocketmq.namesrv.addr`, the variable NAMESRV_ADDR, an address server (an HTTP address
whose body is the list). Numbers have their unit in their name. This module does no IO: whoever
makes settings passes the environment.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from sluice.client.core.signing import Credentials, make_credentials
from sluice.errors import ConfigError

NAMESERVER_PROPERTY: Final = "rocketmq.namesrv.addr"
NAMESERVER_VARIABLE: Final = "NAMESRV_ADDR"
URL_PROPERTY: Final = "rocketmq.namesrv.url"

_GROUP: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_GROUP_LENGTH_MAX: Final = 120
_TOPIC_LENGTH_MAX: Final = 127

StartAt = Literal["last", "first", "timestamp"]
When = datetime | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """What producers and consumers have in common."""

    nameservers: tuple[str, ...] = ()
    nameserver_url: str = ""
    tls: ssl.SSLContext | None = None
    access_key: str = ""  # of brokers with access control; with the secret key
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    instance_name: str = ""  # of the client's id; empty makes one that no other has
    connect_ms: int = 3_000
    request_ms: int = 3_000
    route_ms: int = 30_000  # how often routes are asked for again
    heartbeat_ms: int = 30_000
    close_ms: int = 10_000  # how long `close` may take
    trace: bool = False
    trace_topic: str = "RMQ_SYS_TRACE_TOPIC"

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("connect_ms", "request_ms", "route_ms", "heartbeat_ms", "close_ms"):
            _need(getattr(self, name) > 0, f"{name} must be above 0")
        if self.nameserver_url:
            _check_url(self.nameserver_url)
        make_credentials(self.access_key, self.secret_key, self.security_token)

    @property
    def credentials(self) -> Credentials | None:
        """What requests are signed with; None where they are not."""
        return make_credentials(self.access_key, self.secret_key, self.security_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings(ClientSettings):
    """What an administrator's client has: nothing beside that, but more patience."""

    request_ms: int = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings(ClientSettings):
    """What a producer has beside that."""

    group: str = "sluice-producer"
    send_ms: int = 3_000  # for a send with all its tries
    tries_max: int = 3
    message_bytes_max: int = 4 * 1024 * 1024
    compress_bytes_min: int = 4096  # 0: never
    compress_level: int = 5
    default_queue_count: int = 4  # of topics that are made by sending
    avoid_slow_brokers: bool = True
    batching: bool = False
    linger_ms: float = 5
    # A broker takes the shortest way with frames that are below 64 KiB, this one at least.
    batch_bytes: int = 60 * 1024
    batch_count: int = 1000
    waiting_max: int = 8192  # sends without an answer, to one broker
    spin_us: int = 200  # a blocking send looks so long for its answer; 0: it sleeps at once

    def __post_init__(self) -> None:
        ClientSettings.__post_init__(self)
        check_group(self.group)
        _need(self.send_ms > 0, "send_ms must be above 0")
        _need(1 <= self.tries_max <= 100, "tries_max: allowed are 1 to 100")
        _need(self.message_bytes_max > 0, "message_bytes_max must be above 0")
        _need(0 <= self.compress_level <= 9, "compress_level: allowed are 0 to 9")
        _need(self.linger_ms >= 0, "linger_ms must not be below 0")
        _need(1 <= self.batch_count <= 32767, "batch_count: allowed are 1 to 32767")
        _need(self.batch_bytes > 0, "batch_bytes must be above 0")
        _need(0 <= self.spin_us <= 10_000, "spin_us: allowed are 0 to 10000")
        _need(self.waiting_max > 0, "waiting_max must be above 0")
        _need(self.compress_bytes_min >= 0, "compress_bytes_min: 0 (never), or from which size on")
        _need(self.default_queue_count > 0, "default_queue_count must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings(ClientSettings):
    """What every kind of consumer has beside that."""

    group: str
    broadcasting: bool = False
    start_at: StartAt = "last"
    start_timestamp: When = 0.0  # with start_at="timestamp": a datetime, or seconds since 1970
    pull_count: int = 32
    pull_wait_ms: int = 15_000
    bulk_bytes: int = 1024 * 1024  # at a time, of a Sluice broker with many waiting; 0: only pulls
    queue_count_max: int = 1000  # messages of one queue in memory; above, nothing is pulled
    queue_bytes_max: int = 100 * 1024 * 1024
    queue_span_max: int = 2000  # from the oldest to the newest of a queue that are in memory
    commit_ms: int = 5_000
    rebalance_ms: int = 20_000
    offset_directory: str = ""  # of a broadcasting consumer; empty: ~/.rocketmq_offsets

    def __post_init__(self) -> None:
        ClientSettings.__post_init__(self)
        check_group(self.group)
        _need(1 <= self.pull_count <= 1024, "pull_count: allowed are 1 to 1024")
        _need(self.start_at in ("last", "first", "timestamp"), "start_at: last, first, timestamp")
        for name in ("queue_count_max", "queue_bytes_max", "queue_span_max", "commit_ms"):
            _need(getattr(self, name) > 0, f"{name} must be above 0")
        _need(self.rebalance_ms > 0, "rebalance_ms must be above 0")
        _need(self.pull_wait_ms > 0, "pull_wait_ms must be above 0")
        has_time = isinstance(self.start_timestamp, datetime) or self.start_timestamp != 0
        _need(
            not has_time or self.start_at == "timestamp",
            "start_timestamp: it counts with start_at='timestamp' only; give both",
        )
        _need(0 <= self.bulk_bytes <= 8 << 20, "bulk_bytes: allowed are 0 to 8388608")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings(ConsumerSettings):
    """What a consumer with a handler has beside that."""

    orderly: bool = False
    concurrency: int = 20  # handlers at one time: threads, or coroutines
    batch_size: int = 1  # messages that one call of the handler gets; above 1: a list
    consume_ms: int = 15 * 60_000  # a handler that takes longer hangs
    tries_max: int = 16  # of one message, before it goes to the dead letters
    suspend_ms: int = 1_000  # an ordered queue rests so long after a failure

    def __post_init__(self) -> None:
        ConsumerSettings.__post_init__(self)
        _need(1 <= self.concurrency <= 1024, "concurrency: allowed are 1 to 1024")
        _need(1 <= self.batch_size <= 1024, "batch_size: allowed are 1 to 1024")
        _need(self.consume_ms > 0, "consume_ms must be above 0")
        _need(self.suspend_ms > 0, "suspend_ms must be above 0")
        _need(self.tries_max >= -1, "tries_max: -1 (for ever), or how often")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings(ConsumerSettings):
    """What a consumer that asks for messages has beside that."""

    auto_commit: bool = True


# What the annotation of a setting lets through; a bool is no number here.
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "When": (int, float, datetime),
}


def _check_types(settings: ClientSettings) -> None:
    """Refuse a value of a wrong type where it is given, not where it is first used."""
    for name, field_of in settings.__dataclass_fields__.items():
        allowed = _TYPES.get(str(field_of.type))
        if allowed is None:
            continue
        value = getattr(settings, name)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join(one.__name__ for one in allowed)
            # What was given is not shown: it may be a secret in the wrong place.
            raise ConfigError(f"{name}: {names}, not {type(value).__name__}")


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


def _check_url(url: str) -> None:
    wrong = f"nameserver_url {url!r}: http://host[:port]/path, whose body lists the nameservers"
    try:
        parts = urlsplit(url)
        holds = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        holds = False
    _need(holds, wrong)


def check_group(group: object) -> None:
    _need(
        isinstance(group, str)
        and len(group) <= _GROUP_LENGTH_MAX
        and _GROUP.fullmatch(group) is not None,
        f"group {group!r}: 1 to {_GROUP_LENGTH_MAX} letters, digits, - and _",
    )


def check_topic(topic: object) -> None:
    _need(
        isinstance(topic, str)
        and len(topic) <= _TOPIC_LENGTH_MAX
        and _GROUP.fullmatch(topic) is not None,
        f"topic {topic!r}: 1 to {_TOPIC_LENGTH_MAX} letters, digits, - and _",
    )


Settings = TypeVar("Settings", bound=ClientSettings)


def make_settings(
    kind: type[Settings],
    nameservers: str | Iterable[str] | None,
    properties: Mapping[str, str] | None,
    environ: Mapping[str, str],
    options: Mapping[str, Any],
) -> Settings:
    """Settings of one kind from what a user gave; a name that does not exist is a ConfigError."""
    given = dict(options)
    unknown = [name for name in given if name not in kind.__dataclass_fields__]
    if unknown:
        allowed = ", ".join(sorted(kind.__dataclass_fields__))
        raise ConfigError(f"no setting is called {unknown[0]}; there are {allowed}")
    group = kind.__dataclass_fields__.get("group")
    if group is not None and group.default is MISSING and "group" not in given:
        raise ConfigError("group: a consumer needs the name of its group; members share topics")
    addresses: tuple[str, ...] = ()
    for source in (
        nameservers,
        (properties or {}).get(NAMESERVER_PROPERTY),
        environ.get(NAMESERVER_VARIABLE),
    ):
        addresses = split_nameservers(source)
        if addresses:
            break
    if addresses:
        given["nameservers"] = addresses
    if not given.get("nameserver_url"):
        given["nameserver_url"] = (properties or {}).get(URL_PROPERTY, "")
    return kind(**given)


def split_nameservers(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Addresses out of "a:1;b:2", or out of several such texts."""
    if given is None:
        return ()
    wrong = ConfigError(f"nameservers: a text as host:port;host:port, or several, not {given!r}")
    try:
        parts = [given] if isinstance(given, str) else list(given)
    except TypeError:
        raise wrong from None
    if not all(isinstance(part, str) for part in parts):
        raise wrong
    return tuple(
        address.strip()
        for part in parts
        for address in part.replace(",", ";").split(";")
        if address.strip()
    )
