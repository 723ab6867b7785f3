"""This package is `sluice collect`: it follows files and sends their lines.

    lines.py       bytes of a file -> lines and events, no IO
    places.py      how far each file was sent, in a directory that one collector holds
    sources.py     an open file: reads from its place, and knows when it is another file
    finding.py     paths and patterns -> the files that are there now
    sending.py     messages of lines -> a broker; what can be tried again and what cannot
    following.py   which files are open: new, known, rotated away, truncated
    noting.py      writes places down while files are read
    collecting.py  the loop: looks, reads, sends, notes
    command.py     flags, signals, progress

A line is noted after a broker has acknowledged it, and read again where that did not happen.
Nothing is kept in memory beside the portion that is under way.
"""
