"""This module says where recorded messages go, and what becomes of their keys. Pure.

A lane is a set of topics beside the real ones: "shadow" sends what was in `orders` to
`orders-shadow`, "stage-{topic}" to `stage-orders`. Whoever wants the original topics has to say so.
Templates know their words and nothing else; they are never run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from sluice.client.core.messages import Message
from sluice.client.core.settings import check_topic
from sluice.errors import ConfigError, MessageInvalid
from sluice.replay.blocks import Row

DEFAULT_LANE: Final = "replay"
COPIES_MAX: Final = 1000
_LANE: Final = re.compile(r"[a-zA-Z0-9_-]*(\{topic\})?[a-zA-Z0-9_-]*")
_WORD: Final = re.compile(r"\{([^{}]*)\}")
_SHARDING: Final = "__SHARDINGKEY"
_SOME_BODY: Final = b"body"
_KEY_WORDS: Final = ("key", "copy", "topic", "offset")


def lane_topics(
    lane: str | None, topics: Collection[str], *, into_original: bool
) -> dict[str, str]:
    """The topic that stands in for each recorded one; raises ConfigError for what is not safe."""
    if into_original:
        if lane is not None:
            raise ConfigError("--into-original sends to the recorded topics: leave --to out")
        return {topic: topic for topic in topics}
    lane = DEFAULT_LANE if lane is None else lane
    if _LANE.fullmatch(lane) is None or not lane:
        raise ConfigError(
            f"--to {lane}: a lane is letters, digits, - and _, as in shadow (orders becomes "
            "orders-shadow), with {topic} once where the topic's name is to stand"
        )
    template = lane if "{topic}" in lane else f"{{topic}}-{lane}"
    chosen = {topic: template.replace("{topic}", topic) for topic in topics}
    for topic, target in chosen.items():
        check_topic(target)
        if target in chosen:
            raise ConfigError(
                f"--to {lane}: messages of {topic} would go into {target}, a topic that was "
                "recorded; say --into-original if that is meant"
            )
    return chosen


class KeyTemplate:
    """How keys are written: "load:{key}" or "{key}-{copy}", with more words beside these two."""

    def __init__(self, text: str) -> None:
        unknown = [word for word in _WORD.findall(text) if word not in _KEY_WORDS]
        rest = _WORD.sub("", text)
        if unknown or "{" in rest or "}" in rest:
            words = ", ".join(f"{{{word}}}" for word in _KEY_WORDS)
            raise ConfigError(f"--rewrite-key {text}: the words are {words}, no others")
        if not text or " " in text or not rest.isprintable():
            raise ConfigError(f"--rewrite-key {text!r}: a key has no blanks and is not empty")
        self.text = text
        self._parts: Sequence[str] = _WORD.split(text)  # text, word, text, word ... text

    @property
    def differs(self) -> bool:
        """Whether copies of one message get keys of their own."""
        return "copy" in self._parts[1::2]

    def fill(self, keys: str, copy: int, topic: str, row: Row) -> str:
        """Several keys, which blanks separate, are written one by one."""
        return " ".join(self._one(key, copy, topic, row) for key in keys.split(" ") if key)

    def _one(self, key: str, copy: int, topic: str, row: Row) -> str:
        values = {"key": key, "copy": copy, "topic": topic, "offset": row.offset}
        return "".join(
            str(values[part]) if index % 2 else part for index, part in enumerate(self._parts)
        )


def key_template(text: str | None, copies: int) -> KeyTemplate | None:
    """What --rewrite-key and --copies say; None: keys stay as they are."""
    if not 1 <= copies <= COPIES_MAX:
        raise ConfigError(f"--copies {copies}: allowed are 1 to {COPIES_MAX}")
    template = KeyTemplate(text) if text is not None else None
    if copies > 1:
        template = template or KeyTemplate("{key}-{copy}")
        if not template.differs:
            raise ConfigError(
                f"--rewrite-key {template.text}: with --copies it needs {{copy}}, so that no key "
                "is there twice"
            )
    return template


class Shape:
    """How a recorded message is made a message again."""

    def __init__(self, template: KeyTemplate | None, extra: dict[str, str]) -> None:
        """`extra`: properties that every message gets."""
        self._template = template
        self._extra = extra
        self.extra_bytes = sum(len(name) + len(value) + 2 for name, value in extra.items())
        try:
            Message("topic", b"body", properties=extra or None)
        except MessageInvalid as error:
            raise ConfigError(f"-p: {error}") from error

    def message(self, topic: str, target: str, row: Row, copy: int) -> Message:
        """A plain message: what was delayed or part of a transaction is what it became."""
        # What a store has taken once is not checked again. In a batch brokers take empty bodies.
        message = Message(target, _SOME_BODY)
        message.body = row.body
        message.tags = row.tags or ""
        message.keys = row.key or ""
        message.flag = row.flag
        kept = dict(row.properties)
        if _SHARDING in kept:
            message.sharding_key = kept.pop(_SHARDING)
        template = self._template
        if template is not None:
            if message.keys:
                message.keys = template.fill(message.keys, copy, topic, row)
            if message.sharding_key:
                message.sharding_key = template.fill(message.sharding_key, copy, topic, row)
        kept |= self._extra
        message.properties = kept or None
        return message
