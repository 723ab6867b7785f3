"""This package is what the client decides, without IO: time and random numbers are arguments.

messages.py        a message to send, one that was received, what became of a send
settings.py        what users may set, checked; where the nameservers are
routes.py          the queues of a topic      faults.py      brokers that are better left alone
selectors.py       which queue                sends.py       what is tried again, and where
batches.py         messages that wait to be sent together
subscriptions.py   what a group wants         allocation.py  who of it reads which queue
process_queues.py  what is in memory of a queue, how far it is done, whether more may come
tracing.py         the lines of RocketMQ's message trace
"""
