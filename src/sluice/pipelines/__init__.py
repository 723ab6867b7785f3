"""This package runs pipelines: plain PySpark over topics, with all around it that is always alike.

    command.py     `sluice pipeline run|serve|new|generate|list`: flags, words for people
    files.py       a pipeline from a file or by name: its function, its settings
    settings.py    what a pipeline is handed: reading, writing, its own settings
    needs.py       what a machine lacks for Spark
    session.py     the SparkSession: settings, where its log goes
    running.py     starts the queries, watches them, ends them between two batches
    progress.py    numbers for people; pure        lag.py   how far groups are behind
    starter.py     what `new` writes
    generating.py  traffic for the ready pipelines, at a rate; traffic.py what it is made of
    story.py       broker, traffic, pipeline and board together; board.py ranks and draws
    tie.py         a process that ends with the one that started it
    ready/         the ready pipelines, each with its traffic

pyspark is imported when a session is made: commands that need no Spark work without it.
"""
