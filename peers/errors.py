"""This module holds the two ways a peer can disappoint: it cannot be had, or it misbehaved."""


class PeerUnavailable(Exception):
    """The peer cannot be had here (no Java, no Maven, no network); a test skips with `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PeerFailed(Exception):
    """The peer is here but did not do what it was asked; the text ends with the tail of its log."""
