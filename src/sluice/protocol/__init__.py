"""This package turns bytes into values and back: the only place that knows a wire or disk layout.

Nothing in it may touch a socket, a file, a clock or a log; it is given bytes and gives bytes.
"""
