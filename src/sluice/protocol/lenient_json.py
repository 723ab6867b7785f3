"""This module reads the JSON that RocketMQ's Java side writes, which is not quite JSON.

Maps whose keys are no strings come without quotes:

    {"offsetTable":{"T@G":{0:5,1:7}}}                           integers
    {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}  whole objects

Reading puts the quotes where they are missing, outside of strings, and leaves the rest to a strict
parser. The key of the second example becomes the text of the object. One pass over the text: its
time grows with its size and nothing else. No IO; the caller bounds the size.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

# A string is matched first and left alone, so that its content is never taken for a key. It may
# lack its end: otherwise the search would begin anew at every quote in it, in quadratic time.
# An object that is followed by a colon can only be a key; RocketMQ's hold no other objects.
_STRING: Final = rb'"(?:[^"\\]|\\.)*+"?'
_STRING_OR_BARE_KEY: Final = re.compile(
    _STRING + rb"|(?<=[{,])(\s*+)(?:(-?\d++)|(\{(?:[^{}\"]++|" + _STRING + rb")*+\}))(\s*+:)",
    re.DOTALL,
)


def loads(data: bytes | memoryview) -> Any:
    """The value; raises ValueError for what is no JSON even with quoted keys."""
    return orjson.loads(_STRING_OR_BARE_KEY.sub(_quote, data))


def _quote(match: re.Match[bytes]) -> bytes:
    before, number, whole, after = match.groups()
    if number is not None:
        return b'%b"%b"%b' % (before, number, after)
    if whole is not None:
        try:
            return before + orjson.dumps(str(whole, "utf-8")) + after
        except UnicodeDecodeError:
            return match[0]  # the strict parser will refuse it
    return match[0]
