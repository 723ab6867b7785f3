"""This module shows orders that are cancelled when they are not paid in time.

With each order a message is sent that comes later. Payment takes it back (`recall`); where that is
too late, the message comes and finds a paid order, which it leaves alone. So the order's state
decides, and the recall only saves work. Nobody scans a table for old orders.

    python -m examples.unpaid --namesrv 127.0.0.1:9876
"""

from __future__ import annotations

import argparse
import os
import threading
import time

from sluice import Admin, Message, Producer, PushConsumer, ReceivedMessage
from sluice.errors import SluiceError

TOPIC = "order-deadlines"
GROUP = "canceller"


class OrderDesk:
    """Orders and their state; in a shop these are rows of a table, changed by one statement each.

    `new` -> `paid` or `cancelled`, and never back.
    """

    def __init__(self, producer: Producer, pay_within_seconds: float) -> None:
        self._producer = producer
        self._pay_within_seconds = pay_within_seconds
        self._lock = threading.Lock()
        self._handles: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.recalled = 0
        self.came_for_paid = 0

    def create(self, order: str) -> None:
        """The deadline is sent first: an order without one would wait for ever."""
        message = Message(TOPIC, order, keys=order, delay_seconds=self._pay_within_seconds)
        handle = self._producer.send(message).recall_handle
        with self._lock:
            self.states[order] = "new"
            self._handles[order] = handle

    def pay(self, order: str) -> bool:
        """Whether the payment is taken; a cancelled order cannot be paid."""
        with self._lock:
            if self.states[order] != "new":
                return False
            self.states[order] = "paid"
            handle = self._handles.pop(order)
        try:
            self._producer.recall(TOPIC, handle)
            self.recalled += 1
        except SluiceError:
            pass  # delivered a moment ago, or the broker does not recall: `due` looks at the state
        return True

    def due(self, message: ReceivedMessage) -> None:
        """The deadline of an order has come. It may come twice."""
        order = message.body.decode()
        with self._lock:
            state = self.states.get(order)
            if state == "new":
                self.states[order] = "cancelled"
            elif state == "paid":
                self.came_for_paid += 1

    def count(self, state: str) -> int:
        with self._lock:
            return list(self.states.values()).count(state)


def run(namesrv: str, *, order_count: int = 20, pay_within_seconds: float = 3.0) -> OrderDesk:
    """Every second order is paid; the others are cancelled when their time is over."""
    name = f"order-{int(time.time())}"
    with Admin(namesrv) as admin:
        admin.create_topic(TOPIC, queues=4)
    with Producer(namesrv, group="shop") as producer:
        desk = OrderDesk(producer, pay_within_seconds)
        with PushConsumer(namesrv, group=GROUP, topics=TOPIC, handler=desk.due, start_at="first"):
            for number in range(order_count):
                desk.create(f"{name}-{number}")
            for number in range(0, order_count, 2):
                assert desk.pay(f"{name}-{number}"), "it is paid long before its deadline"
            print(f"{order_count} orders, {desk.count('paid')} paid, {desk.recalled} recalled")
            deadline = time.monotonic() + 120
            while desk.count("new"):
                if time.monotonic() > deadline:
                    raise TimeoutError("deadlines do not come; does the broker run?")
                time.sleep(0.05)
            late = f"{name}-1"
            assert not desk.pay(late), "it was cancelled"
    print(f"{desk.count('cancelled')} cancelled after {pay_within_seconds:g} s")
    return desk


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Orders that are not paid are cancelled.")
    parser.add_argument("--namesrv", default=os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    parser.add_argument("--pay-within-seconds", type=float, default=3.0)
    arguments = parser.parse_args(argv)
    run(arguments.namesrv, pay_within_seconds=arguments.pay_within_seconds)


if __name__ == "__main__":
    main()
