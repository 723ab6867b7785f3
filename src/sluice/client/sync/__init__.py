"""This package is the blocking face of the client: the same objects, on one event loop thread."""
