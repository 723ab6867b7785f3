"""This package drives the client's core with asyncio; `sluice.aio` exports what users need.

session.py    connections, routes, heartbeats     links.py    one connection, with quick sends
producer.py   sends; transactions.py, requests.py what goes beyond one message
member.py     a member of a group: its queues, offsets, rebalance
push.py       handlers; workers.py who runs them  pull.py     messages by asking
"""
