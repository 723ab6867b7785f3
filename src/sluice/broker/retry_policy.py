"""This module decides how long a failed message waits and how often it is tried.

RocketMQ has two ways to say it. Without a policy of its own a group waits by the delay levels, from
the third one on: 10 s 30 s 1 m ... 2 h. A group may have a list of times instead (CUSTOMIZED), or a
time that grows (EXPONENTIAL); Apache's broker keeps these and leaves them to its proxy, here they
count for every consumer that does not name a level itself. Pure: no clock, no store.
"""

from __future__ import annotations

from typing import Any, Final

from sluice.broker.groups import GroupSettings
from sluice.errors import ParameterInvalid

FIRST_LEVEL: Final = 3  # of the first retry: the levels below are for delayed messages
DELAY_MS_MAX: Final = 40 * 24 * 3_600_000
TIMES_MAX: Final = 1024  # values of a list
_SKIPPED: Final = 2  # the list is written like the levels: retries begin with the third value
_EXPONENT_MAX: Final = 32
_DEFAULT_TIMES_MAX: Final = GroupSettings("").retry_max


def times_max(settings: GroupSettings, asked: int | None) -> int:
    """How often a message is tried again: the consumer's word, within what the group allows.

    Clients always say a number, mostly the default. A group with another maximum than the default
    means it.
    """
    own = settings.retry_max
    if asked is None:
        return own
    return asked if own == _DEFAULT_TIMES_MAX else min(asked, own)


def delay_ms(settings: GroupSettings, times: int) -> int | None:
    """How long a message waits that failed after `times` retries; None: as the levels say."""
    policy = settings.extra.get("groupRetryPolicy")
    if not isinstance(policy, dict):
        return None
    if policy.get("type") == "EXPONENTIAL" and policy.get("exponentialRetryPolicy"):
        initial, most, multiplier = _exponential(policy["exponentialRetryPolicy"])
        # A float would be infinite soon; whole numbers are only large.
        return int(min(most, initial * multiplier ** min(max(0, times), _EXPONENT_MAX)))
    if policy.get("type", "CUSTOMIZED") == "CUSTOMIZED" and policy.get("customizedRetryPolicy"):
        times_ms = _customized(policy["customizedRetryPolicy"])
        return times_ms[min(max(0, times) + _SKIPPED, len(times_ms) - 1)]
    return None


def check_policy(settings: GroupSettings) -> None:
    """Refuse a policy that could not be followed."""
    policy = settings.extra.get("groupRetryPolicy")
    if policy is None:
        return
    if not isinstance(policy, dict):
        raise ParameterInvalid(f"group {settings.name}: groupRetryPolicy is no object")
    if policy.get("type", "CUSTOMIZED") not in ("CUSTOMIZED", "EXPONENTIAL"):
        raise ParameterInvalid(
            f"group {settings.name}: groupRetryPolicy type is CUSTOMIZED or EXPONENTIAL"
        )
    try:
        if policy.get("customizedRetryPolicy") is not None:
            _customized(policy["customizedRetryPolicy"])
        if policy.get("exponentialRetryPolicy") is not None:
            _exponential(policy["exponentialRetryPolicy"])
    except ParameterInvalid as error:
        raise ParameterInvalid(f"group {settings.name}: groupRetryPolicy: {error}") from None


def _customized(value: Any) -> list[int]:
    times = value.get("next") if isinstance(value, dict) else None
    if not isinstance(times, list) or not 1 <= len(times) <= TIMES_MAX:
        raise ParameterInvalid(f"next holds 1 to {TIMES_MAX} times in milliseconds")
    return [_number(each, "next", 0, DELAY_MS_MAX) for each in times]


def _exponential(value: Any) -> tuple[int, int, int]:
    members = value if isinstance(value, dict) else {}
    return (
        _number(members.get("initial", 5_000), "initial", 1, DELAY_MS_MAX),
        _number(members.get("max", 2 * 3_600_000), "max", 1, DELAY_MS_MAX),
        _number(members.get("multiplier", 2), "multiplier", 1, 1_000),
    )


def _number(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ParameterInvalid(f"{name} is a whole number from {least} to {most}")
    return value
