"""This package is `sluice record` and `sluice replay`: traffic is kept in files and sent again.

    texts.py           times, spans, speeds, rates and curves as people write them; pure
    pacing.py          when a recorded message is due again; pure
    measuring.py       what happened in each second, and when it is enough; pure
    places.py          a directory or a bucket: whole files or none
    manifest.py        what a recording holds, and how far it is
    columns.py         stored entries -> the columns of a recording
    fetching.py        topics -> chunks, up to where a recording ends
    recording.py       chunks -> Parquet files, without gap or repeat over kill -9
    record_command.py  `sluice record`
    blocks.py          a recording -> messages of all queues in the order of their times
    lanes.py           where messages go instead of where they were; what becomes of their keys
    topics.py          makes the topics of a lane as the originals are
    sending.py         the loop: what is due goes out, in the order of its queue
    plots.py           curves as SVG
    report.py          what a replay did, as JSON and as a page
    replay_command.py  `sluice replay`

Neither needs Spark or Java; both need pyarrow. docs/adr/0030 says why it is so.
"""
