"""This module sends from the thread that waits for the answer: no other thread is woken up for it.

A producer has one such connection to a broker. The thread that finds it free writes a frame, reads
the answer and is done. Whoever finds it taken, and every send that is not a plain one, goes through
the event loop. So does a send that failed here: what happens next is decided in one place.

An answer of a broker nearby is there sooner than a thread that sleeps for it has woken up. So the
thread looks for it for a moment first, and looks less often where that was in vain.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from typing import Final

from sluice import tcp
from sluice.client.aio.operations import Direct, direct_send
from sluice.client.aio.producer import Sender
from sluice.client.core.faults import QUICK_MS
from sluice.client.core.messages import Message, SendResult, SendStatus
from sluice.client.sync.futures import SendFuture
from sluice.client.sync.loop_thread import LoopThread
from sluice.errors import LinkError, LinkLost, ProtocolError, RequestTimedOut
from sluice.link import ANSWER_HEADER_BYTES_MAX, split_address
from sluice.protocol import remoting
from sluice.protocol.client_frames import answer_mark
from sluice.protocol.framing import FRAME_BYTES_MAX, FRAME_BYTES_MIN
from sluice.protocol.remoting_codes import ResponseCode

_READ_BYTES: Final = 8192
# A broker closes what says nothing for two minutes, and then a send would find out too late.
_IDLE_SECONDS_MAX: Final = 20.0
_NUMBER_MAX: Final = 0x7FFFFFFF
_TIMEVAL: Final = struct.Struct("@ll")
_SKIPPED_MAX: Final = 1023  # answers that are not looked for after looking was in vain


def _look_seconds(spin_us: int) -> float:
    """How long a thread may look for an answer: with one processor it would only be in the way."""
    if not sys.platform.startswith("linux"):
        return 0.0
    return spin_us * 1e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0


class Line:
    """One blocking connection. Belongs to the thread that holds its owner's lock."""

    def __init__(self, address: str, seconds: float, spin_us: int = 0) -> None:
        self.address = address
        self.used_at = time.monotonic()
        self._look_seconds = _look_seconds(spin_us)
        self._skipped = 0  # so many answers in a row were not looked for
        self._skip_count = 0 if self._look_seconds else -1
        self._number = 0
        self._seconds = -1.0
        self._kept = b""
        try:
            self._socket = socket.create_connection(split_address(address), timeout=seconds)
            tcp.set_up(self._socket)
        except ValueError as error:
            raise LinkLost(f"cannot connect: {error}") from error
        except OSError as error:
            raise LinkLost(f"{address}: cannot connect: {error.strerror or error}") from error

    def next_number(self) -> int:
        self._number = self._number + 1 if self._number < _NUMBER_MAX else 0
        return self._number

    def exchange(self, frame: bytes, number: int, seconds: float) -> tuple[int, bytes]:
        """Send a request and wait for the answer with its number: its code, and all of it.

        The code is -1 where it takes a closer look to find it.
        """
        if seconds != self._seconds:
            self._set_timeout(seconds)
        try:
            self._socket.sendall(frame)
            while True:
                answer = self._receive()
                mark = answer_mark(answer)
                if mark is None:
                    if _is_answer(answer, number):
                        return -1, answer
                elif mark[0] == number:
                    return mark[1], answer
        except (TimeoutError, BlockingIOError):
            text = f"{self.address} did not answer a send within {seconds:g} s"
            raise RequestTimedOut(text) from None
        except (OSError, ProtocolError) as error:
            text = f"{self.address}: the connection was lost before the answer came: {error}"
            raise LinkLost(text) from error

    def _set_timeout(self, seconds: float) -> None:
        self._seconds = seconds
        if not sys.platform.startswith("linux"):
            self._socket.settimeout(seconds)
            return
        # The system watches the time. Python would ask it twice for every answer.
        self._socket.setblocking(True)
        whole = int(seconds)
        span = _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

    def _receive(self) -> bytes:
        """The next frame, without its length."""
        data = self._kept or self._look() or self._read()
        while len(data) < 4:
            data += self._read()
        size = int.from_bytes(data[:4], "big")
        if not FRAME_BYTES_MIN <= size <= FRAME_BYTES_MAX:
            raise LinkLost(f"{self.address}: a frame of {size} bytes")
        end = 4 + size
        while len(data) < end:
            data += self._read()
        self._kept = data[end:]
        return data[4:end]

    def _look(self) -> bytes:
        """What has come, or comes within a moment; nothing where it is not worth it.

        Twice as many answers are left out each time that one did not come within the moment.
        """
        if self._skipped != self._skip_count:
            self._skipped += 1
            return b""
        self._skipped = 0
        receive, clock = self._socket.recv, time.perf_counter
        end = clock() + self._look_seconds
        while True:
            try:
                data = receive(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if clock() < end:
                    continue
                self._skip_count = min(2 * self._skip_count + 1, _SKIPPED_MAX)
                return b""
            self._skip_count = 0
            return data  # nothing where it was closed: so does the next read say

    def _read(self) -> bytes:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise LinkLost(f"{self.address}: the connection was closed before the answer came")
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Who waits for an answer in another thread learns of it now.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _is_answer(frame: bytes, number: int) -> bool:
    """Whether a frame without a binary header is the answer with a number."""
    command = remoting.decode(frame, ANSWER_HEADER_BYTES_MAX)
    return command.is_answer and command.opaque == number


class DirectSends:
    """The direct connections of one producer, one to a broker."""

    def __init__(self, producer: Sender, thread: LoopThread) -> None:
        self._producer = producer
        self._thread = thread
        self._lock = threading.Lock()
        self._lines: dict[str, Line] = {}
        self._is_closed = False

    def send(self, message: Message, timeout_ms: int) -> SendResult | None:
        """Send and wait; None where the event loop has to do it."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            direct = direct_send(self._producer, message, timeout_ms)
            if direct is None or self._is_closed:
                return None
            outcome = self._exchange(direct)
        finally:
            self._lock.release()
        return outcome if isinstance(outcome, SendResult) else outcome.result()

    def _exchange(self, direct: Direct) -> SendResult | SendFuture:
        """The result; or its future, where the event loop has to make the best of it."""
        line: Line | None = None
        is_done = False
        try:
            line = self._line(direct.address, direct.started, direct.seconds)
            number = line.next_number()
            frame = direct.template.frame(
                number, 0, direct.born_ms, direct.properties, direct.message.body
            )
            code, answer = line.exchange(frame, number, direct.seconds)
            is_done = True
        except LinkError as error:
            future = SendFuture()
            operation = direct.operation(future)
            self._thread.loop.call_soon_threadsafe(operation.came_back, error)
            return future
        finally:
            if not is_done and line is not None:  # what comes over it now is nobody's
                self._drop(line)
        now = line.used_at = time.monotonic()
        if code == ResponseCode.SUCCESS and (now - direct.started) * 1000 <= QUICK_MS:
            return SendResult(SendStatus.OK, direct.properties, direct.queue, answer)
        future = SendFuture()
        operation = direct.operation(future)
        self._thread.loop.call_soon_threadsafe(operation.came_back_answered, answer)
        return future

    def _line(self, address: str, now: float, seconds: float) -> Line:
        line = self._lines.get(address)
        if line is not None and now - line.used_at > _IDLE_SECONDS_MAX:
            self._drop(line)
            line = None
        if line is None:
            connect_seconds = self._producer.settings.connect_ms / 1000
            spin_us = self._producer.settings.spin_us
            line = self._lines[address] = Line(address, min(seconds, connect_seconds), spin_us)
        return line

    def _drop(self, line: Line) -> None:
        line.close()
        if self._lines.get(line.address) is line:
            del self._lines[line.address]

    def close(self, seconds: float) -> None:
        """No more sends this way; the one that is under way may end, for a bounded time."""
        self._is_closed = True
        is_free = self._lock.acquire(timeout=seconds)
        for line in list(self._lines.values()):
            line.close()
        if is_free:
            self._lines.clear()
            self._lock.release()
