"""This module knows the configurations of Kafka's topics: names, defaults, and what they may be.

They are kept as attributes of the topic, with "kafka." in front of their names. Those that say how
Kafka's own files are laid out are kept and shown, because tools set them; they mean nothing here.
What would promise something that is not done is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Node, Request, code_of
from sluice.broker.kafka_broker_configs import BrokerConfigs
from sluice.broker.kafka_config_texts import TEXTS
from sluice.broker.kafka_partitions import (
    CONFIG_PREFIX,
    DELAY_HEADERS,
    PRODUCERS_CODEC,
    KafkaTopic,
    is_name,
)
from sluice.errors import ConfigError, SluiceError
from sluice.protocol import kafka_codes
from sluice.protocol.kafka_batches import COMPRESSIONS

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
_SET_HERE: Final = 1  # where a value comes from, in Kafka's numbers
_SET_FOR_ALL: Final = 3
_DEFAULT: Final = 5
# Kafka's brokers set it for all of them when a cluster begins, since they know who may lead.
_MIN_REPLICAS: Final = "min.insync.replicas"
_BOOLEAN, _STRING, _INT, _, _LONG, _DOUBLE, _LIST = range(1, 8)
_SET, _DELETE, _ADD, _TAKE = range(4)
_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1
_HOUR_MS: Final = 3_600_000


class _Known(NamedTuple):
    kind: int
    default: str
    low: float = 0
    high: float = 0
    words: tuple[str, ...] = ()


_REPLICAS: Final = ("*", "PARTITION:BROKER,...")  # what reassignments of partitions slow down
_REPLICA: Final = re.compile(r"(?:[0-9]{1,10}:[0-9]{1,10})?")

_KNOWN: Final = {
    "cleanup.policy": _Known(_LIST, "delete", words=("delete", "compact")),
    # How hard codecs try is left to their libraries.
    "compression.gzip.level": _Known(_INT, "-1", -1, 9),
    "compression.lz4.level": _Known(_INT, "9", 1, 17),
    "compression.type": _Known(_STRING, PRODUCERS_CODEC, words=(PRODUCERS_CODEC, *COMPRESSIONS)),
    "compression.zstd.level": _Known(_INT, "3", -131_072, 22),
    "delete.retention.ms": _Known(_LONG, "86400000", 0, _LONG_MAX),
    "file.delete.delay.ms": _Known(_LONG, "60000", 0, _LONG_MAX),
    "follower.replication.throttled.replicas": _Known(_LIST, "", words=_REPLICAS),
    "flush.messages": _Known(_LONG, str(_LONG_MAX), 1, _LONG_MAX),
    "flush.ms": _Known(_LONG, str(_LONG_MAX), 0, _LONG_MAX),
    "index.interval.bytes": _Known(_INT, "4096", 0, _INT_MAX),
    "leader.replication.throttled.replicas": _Known(_LIST, "", words=_REPLICAS),
    "local.retention.bytes": _Known(_LONG, "-2", -2, _LONG_MAX),
    "local.retention.ms": _Known(_LONG, "-2", -2, _LONG_MAX),
    "max.compaction.lag.ms": _Known(_LONG, str(_LONG_MAX), 1, _LONG_MAX),
    "max.message.bytes": _Known(_INT, "", 0, 64 * 1024 * 1024),
    "message.timestamp.after.max.ms": _Known(_LONG, "3600000", 0, _LONG_MAX),
    "message.timestamp.before.max.ms": _Known(_LONG, str(_LONG_MAX), 0, _LONG_MAX),
    "message.timestamp.type": _Known(_STRING, "CreateTime", words=("CreateTime", "LogAppendTime")),
    "min.cleanable.dirty.ratio": _Known(_DOUBLE, "0.5", 0, 1),
    "min.compaction.lag.ms": _Known(_LONG, "0", 0, _LONG_MAX),
    "min.insync.replicas": _Known(_INT, "1", 1, _INT_MAX),
    "preallocate": _Known(_BOOLEAN, "false", words=("true", "false")),
    "remote.log.copy.disable": _Known(_BOOLEAN, "false", words=("true", "false")),
    "remote.log.delete.on.disable": _Known(_BOOLEAN, "false", words=("true", "false")),
    "remote.storage.enable": _Known(_BOOLEAN, "false", words=("false",)),
    "retention.bytes": _Known(_LONG, "-1", -1, _LONG_MAX),
    "retention.ms": _Known(_LONG, "", -1, _LONG_MAX),
    "segment.bytes": _Known(_INT, "1073741824", 1_048_576, _INT_MAX),
    "segment.index.bytes": _Known(_INT, "10485760", 4, _INT_MAX),
    "segment.jitter.ms": _Known(_LONG, "0", 0, _LONG_MAX),
    "segment.ms": _Known(_LONG, "604800000", 1, _LONG_MAX),
    DELAY_HEADERS: _Known(_BOOLEAN, "false", words=("true", "false")),
    "unclean.leader.election.enable": _Known(_BOOLEAN, "false", words=("true", "false")),
}

# The first may not be more than the second.
_LAGS: Final = ("min.compaction.lag.ms", "max.compaction.lag.ms")

# What Kafka's brokers call the defaults of their topics, where it is not the same; "": nothing.
_OF_BROKER: Final = {
    "cleanup.policy": "log.cleanup.policy",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "",
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "log.index.interval.bytes",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "log.local.retention.bytes",
    "local.retention.ms": "log.local.retention.ms",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.type": "log.message.timestamp.type",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "preallocate": "log.preallocate",
    "remote.log.copy.disable": "",
    "remote.log.delete.on.disable": "",
    "remote.storage.enable": "",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "",
    "segment.bytes": "log.segment.bytes",
    "segment.index.bytes": "log.index.size.max.bytes",
    "segment.jitter.ms": "",
    "segment.ms": "",
    DELAY_HEADERS: "",
}


def check_config(name: str, value: str | None) -> str:
    """What is wrong with a configuration; empty where nothing is."""
    known = _KNOWN.get(name)
    if known is None:
        return f"Unknown topic config name: {name[:100]}"
    if value is None:
        return f"{name} has no value"
    if known.words:
        parts = [each.strip() for each in value.split(",")] if known.kind == _LIST else [value]
        if known.kind == _BOOLEAN:
            parts = [value.strip().lower()]
        if known.words is _REPLICAS:
            if parts == ["*"] or all(map(_REPLICA.fullmatch, parts)):
                return ""
        elif all(part.strip() in known.words for part in parts):
            return ""
        elif known.kind == _LIST and not value.strip():
            return ""  # neither is done
        return f"{name}={value[:100]}: only {', '.join(known.words)} is supported here"
    try:
        number = float(value) if known.kind == _DOUBLE else int(value)
    except ValueError:
        return f"{name}={value[:100]} is no number"
    if known.low <= number <= known.high:
        return ""
    return f"{name}={value[:100]} is outside of {known.low} to {known.high}"


def check_configs(configs: Mapping[str, str | None]) -> str:
    """What is wrong with configurations of a topic, each and together; empty where nothing is."""
    for name, value in configs.items():
        wrong = check_config(name, value)
        if wrong:
            return wrong
    return _check_together(configs)


def _check_together(configs: Mapping[str, str | None]) -> str:
    """What is wrong with configurations that were looked at one by one, or are there already."""
    lags = [configs.get(name) or _KNOWN[name].default for name in _LAGS]
    if any(map(check_config, _LAGS, lags)) or int(lags[0]) <= int(lags[1]):
        return ""
    return f"{_LAGS[0]}={lags[0]} is more than {_LAGS[1]}={lags[1]}"


def shown_configs(
    core: BrokerCore,
    topic: KafkaTopic,
    names: list[str] | None = None,
    *,
    synonyms: bool = False,
) -> list[dict[str, Any]]:
    """The configurations of a topic, as answers list them; with where each value could be from."""
    result = []
    for name, known in _KNOWN.items():
        if names is not None and name not in names:
            continue
        own = topic.config(name)
        result.append(
            {
                "name": name,
                "value": own if own is not None else _default(core, name),
                "config_source": _source(name) if own is None else _SET_HERE,
                "config_type": known.kind,
                "synonyms": _synonyms(core, name, own) if synonyms else [],
            }
        )
    return result


def _synonyms(core: BrokerCore, name: str, own: str | None) -> list[dict[str, Any]]:
    """The value that holds, then the one that would hold without it."""
    found = [] if own is None else [{"name": name, "value": own, "source": _SET_HERE}]
    broker_name = _OF_BROKER.get(name, name)
    if broker_name:
        value = _default(core, name)
        sources = dict.fromkeys((_source(name), _DEFAULT))
        found += [{"name": broker_name, "value": value, "source": source} for source in sources]
    return found


def _source(name: str) -> int:
    """Where a value comes from that a topic does not set."""
    return _SET_FOR_ALL if name == _MIN_REPLICAS else _DEFAULT


def _default(core: BrokerCore, name: str) -> str:
    if name == "max.message.bytes":
        return str(core.config.kafka_batch_bytes_max)
    if name == "retention.ms":
        return str(core.config.store.retention_hours * _HOUR_MS)
    if name == "message.timestamp.after.max.ms":
        return str(core.config.kafka_timestamp_ahead_ms_max)
    return _KNOWN[name].default


class KafkaConfigs:
    """Configurations of one broker's topics, and those of its own that are like Kafka's."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._broker = BrokerConfigs(core)

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.DESCRIBE_CONFIGS, 1, 4, self.describe)
        api.register(kafka_codes.ALTER_CONFIGS, 0, 2, self.alter)
        api.register(kafka_codes.INCREMENTAL_ALTER_CONFIGS, 0, 1, self.alter_some)

    def describe(self, request: Request, answer: Answer) -> None:
        body, node = request.body, request.peer.node
        results = [
            self._describe(each, node, bool(body.include_synonyms)) for each in body.resources
        ]
        if getattr(body, "include_documentation", False):
            for config in chain.from_iterable(result["configs"] for result in results):
                config["documentation"] = TEXTS.get(config["name"])
        answer({"results": results})

    def _describe(self, asked: Any, node: Node, synonyms: bool) -> dict[str, Any]:
        result: dict[str, Any] = {
            "resource_type": asked.resource_type,
            "resource_name": asked.resource_name,
            "configs": [],
        }
        names = list(asked.configuration_keys or ()) or None  # who names none wants all
        if asked.resource_type == TOPIC_RESOURCE:
            topic = self._core.kafka_topics.find(asked.resource_name)
            if not is_name(asked.resource_name):
                return {**result, "error_code": kafka_codes.INVALID_TOPIC_EXCEPTION}
            if topic is None:
                return {**result, "error_code": kafka_codes.UNKNOWN_TOPIC_OR_PARTITION}
            configs = shown_configs(self._core, topic, names, synonyms=synonyms)
            return {**result, "configs": configs}
        if asked.resource_type == BROKER_RESOURCE and not asked.resource_name:
            return {**result, "configs": self._set_for_all(names)}
        if asked.resource_type == BROKER_RESOURCE and asked.resource_name == str(node.node_id):
            shown = self._broker.shown(node, names, synonyms=synonyms)
            return {**result, "configs": shown}
        return {
            **result,
            "error_code": kafka_codes.INVALID_REQUEST,
            "error_message": "only topics and this broker have configurations",
        }

    def _set_for_all(self, names: list[str] | None) -> list[dict[str, Any]]:
        """What was set for all brokers at once."""
        config = {
            "name": _MIN_REPLICAS,
            "value": _KNOWN[_MIN_REPLICAS].default,
            "read_only": True,
            "config_source": _SET_FOR_ALL,
            "config_type": _INT,
        }
        wanted = [config] if names is None or _MIN_REPLICAS in names else []
        return wanted + self._broker.set_for_all(names)

    # ------------------------------------------------------------------------------------- changing

    def alter(self, request: Request, answer: Answer) -> None:
        """All configurations of a topic at once: what is not named has its default again."""

        def wanted(topic: KafkaTopic, asked: Any) -> dict[str, str] | str:
            configs = {each.name: each.value for each in asked.configs}
            return check_configs(configs) or configs

        self._alter(request, answer, wanted, is_whole=True)

    def alter_some(self, request: Request, answer: Answer) -> None:
        self._alter(request, answer, _changed, is_whole=False)

    def _alter(
        self,
        request: Request,
        answer: Answer,
        wanted: Callable[[KafkaTopic, Any], dict[str, str] | str],
        *,
        is_whole: bool,
    ) -> None:
        asked = request.body.resources
        results: list[dict[str, Any]] = [{} for _ in asked]
        left = len(asked)

        def finish(at: int, code: int, reason: str | None = None) -> None:
            nonlocal left
            results[at] = {
                "error_code": code,
                "error_message": reason,
                "resource_type": asked[at].resource_type,
                "resource_name": asked[at].resource_name,
            }
            left -= 1
            if not left:
                answer({"responses": results})

        if not asked:
            answer({"responses": []})
        times = Counter((each.resource_type, each.resource_name) for each in asked)
        for at, each in enumerate(asked):
            topic = self._core.kafka_topics.find(each.resource_name)
            malformed = _malformed(each)
            if times[each.resource_type, each.resource_name] > 1:
                finish(at, kafka_codes.INVALID_REQUEST, "it is named twice")
            elif malformed:
                finish(at, kafka_codes.INVALID_REQUEST, malformed)
            elif each.resource_type == BROKER_RESOURCE:
                self._change_broker(request, at, each, is_whole, finish)
            elif each.resource_type != TOPIC_RESOURCE:
                reason = "only the configurations of topics and of this broker change"
                finish(at, kafka_codes.INVALID_REQUEST, reason)
            elif not each.resource_name:
                finish(at, kafka_codes.INVALID_REQUEST, "topics have no configurations in common")
            elif not is_name(each.resource_name):
                finish(at, kafka_codes.INVALID_TOPIC_EXCEPTION)
            elif topic is None:
                finish(at, kafka_codes.UNKNOWN_TOPIC_OR_PARTITION)
            elif topic.dead_group:
                finish(at, kafka_codes.TOPIC_AUTHORIZATION_FAILED, "dead letters are only read")
            else:
                self._change(at, topic, wanted(topic, each), request.body.validate_only, finish)

    def _change_broker(
        self, request: Request, at: int, asked: Any, is_whole: bool, finish: Callable[..., None]
    ) -> None:
        level, own = asked.resource_name or "", str(request.peer.node.node_id)
        if level not in ("", own):
            reason = f"this is broker {own}, not {level[:100]}"
            finish(at, kafka_codes.INVALID_REQUEST, reason)
            return
        changes = self._broker.wanted(level, asked, is_whole=is_whole)
        if isinstance(changes, str):
            finish(at, kafka_codes.INVALID_REQUEST, changes)
            return

        def told(error: SluiceError | None) -> None:
            finish(
                at, 0 if error is None else code_of(error), None if error is None else str(error)
            )

        try:
            self._broker.change(level, changes, only_check=request.body.validate_only, done=told)
        except ConfigError as error:
            finish(at, kafka_codes.INVALID_REQUEST, str(error))
        except SluiceError as error:
            told(error)

    def _change(
        self,
        at: int,
        topic: KafkaTopic,
        configs: dict[str, str] | str,
        only_check: bool,
        finish: Callable[..., None],
    ) -> None:
        if isinstance(configs, dict) and not topic.batches:
            wrong = _only_for_batches(configs)
            if wrong:
                configs = f"{wrong}: only for topics that Kafka's clients have made"
        if isinstance(configs, str):
            finish(at, kafka_codes.INVALID_CONFIG, configs)
            return
        if only_check:
            finish(at, 0)
            return
        kept = {
            name: value
            for name, value in topic.settings.attributes.items()
            if not name.startswith(CONFIG_PREFIX)
        }
        kept.update({CONFIG_PREFIX + name: value for name, value in configs.items()})

        def told(error: SluiceError | None) -> None:
            finish(
                at, 0 if error is None else code_of(error), None if error is None else str(error)
            )

        try:
            self._core.topics.put([replace(topic.settings, attributes=kept)], told)
        except SluiceError as error:
            told(error)
            return
        self._core.ask_turn()


def _malformed(asked: Any) -> str:
    """What is wrong with changes, whatever they are about."""
    times = Counter(each.name for each in asked.configs)
    for each in asked.configs:
        if times[each.name] > 1:
            return f"{each.name[:100]} is named twice"
        if each.value is None and getattr(each, "config_operation", _SET) != _DELETE:
            return f"{each.name[:100]} has no value"
    return ""


def _only_for_batches(configs: dict[str, str]) -> str:
    """What a topic of single messages cannot do."""
    if "compact" in configs.get("cleanup.policy", ""):
        return "cleanup.policy=compact"
    compression = configs.get("compression.type", "")
    return f"compression.type={compression}" if compression in COMPRESSIONS else ""


def _changed(topic: KafkaTopic, asked: Any) -> dict[str, str] | str:
    """A topic's configurations after single changes, or what is wrong with one."""
    configs = {name: value for name in _KNOWN if (value := topic.config(name)) is not None}
    for each in asked.configs:
        name, operation = each.name, each.config_operation
        known = _KNOWN.get(name)
        if operation == _DELETE:
            configs.pop(name, None)
            continue
        if known is None:
            return check_config(name, "")
        value = each.value or ""
        if operation in (_ADD, _TAKE):
            if known.kind != _LIST:
                return f"{name} is no list"
            now = [part for part in configs.get(name, known.default).split(",") if part]
            given = value.split(",")
            if operation == _ADD:
                value = ",".join(dict.fromkeys(now + given))
            else:
                value = ",".join(part for part in now if part not in given)
        elif operation != _SET:
            return f"unknown operation {operation}"
        wrong = check_config(name, value)
        if wrong:
            return wrong
        configs[name] = value
    return _check_together(configs) or configs
