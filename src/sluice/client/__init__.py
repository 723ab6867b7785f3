"""This package talks to brokers as a client: today the few calls that the command line needs.

It works over the wire only, so it serves Apache RocketMQ's brokers as well as Sluice's.
"""
