"""This module holds the import directions: arrows only point down.

Think before you add an arrow. A new module needs a row in MAY_IMPORT, or a place in STORAGE_TIERS.
The row says what it may import from the package; the name of a package stands for all in it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tests.tidy.source_tree import SourceFile, python_files, report

BASE = ("model", "errors", "clock", "config", "telemetry", "_version")
SERVICE = ("storage.store", *BASE)
# Services of business messages: they make entries from entries, so they know the entry's form.
BUSINESS = ("broker", "protocol.records", "storage.origins", *SERVICE)
PURE = ("model", "errors")
TRANSLATOR = ("protocol", "broker", "net", "storage.store", *BASE)
ADMIN = ("protocol", *BASE)
ADMIN_COMMANDS = (
    *("client.admin", "client.admin_flags", "client.administration", "client.group_checks"),
    *("client.messages", "client.printing", "client.simple"),
    *ADMIN,
)

# What the store knows of the protocols: the entry, and the JSON of its own tables.
STORED = (
    *("protocol.records", "protocol.record_runs", "protocol.record_tables", "protocol.lifetimes"),
    *("protocol.lenient_json", "protocol.kafka_entries", "protocol.kafka_keys"),
    *("protocol.record_images", "protocol.batch_presses"),
)

# From the bottom to the top: a storage module may import those of lower tiers only.
STORAGE_TIERS = (
    ("stretches", "system_calls", "warmed"),
    ("page_cache",),
    ("residency",),
    ("files",),
    ("admission", "background", "crash_model", "key_index_file", "retention", "snapshot"),
    ("early_writes", "key_batches", "old_pages", "page_blocks", "slow_pages"),
    ("commit_log", "key_index", "memory_files", "queue_index", "segment", "state"),
    (
        "checkpoint",
        "cold_parts",
        "cold_reads",
        "compacted",
        "flush",
        "indexing",
        "log_walk",
        "mends",
        "origins",
        "plain_reads",
        "property_scan",
        "queue_check",
    ),
    ("key_queries", "reads"),
    (
        *("closing", "housekeeping", "inspection", "memory_topics", "offset_commits", "recovery"),
        *("bulk_reads", "staging", "topic_removal"),
    ),
    ("copies", "lanes", "runs", "whole_batches"),
    ("copy_tables", "images"),
    ("inspect_text", "salvage"),
    ("store",),
    ("opening",),
    ("blocking", "inspect"),
)
# What code outside of storage/ may see of it.
STORAGE_PUBLIC = {
    f"storage.{name}"
    for name in (
        *("background", "runs", "store", "opening", "blocking", "files", "memory_files", "inspect"),
        *("bulk_reads", "copies", "copy_tables", "lanes", "origins", "state", "whole_batches"),
        *("compacted", "images", "mends", "queue_index", "staging"),
    )
}

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # base
    "": ("_version", "client", "protocol"),  # of these for annotations only
    "_version": (),
    "errors": (),
    "model": (),
    "clock": (),
    "config": ("config", "errors"),
    "telemetry": ("errors",),
    "metrics_http": ("telemetry", "errors"),
    "process_metrics": ("telemetry", "_version"),
    "heap": (),
    "log_share": (),
    "tcp": (),
    "net": ("log_share", "tcp", "protocol.framing", *BASE),
    "link": ("net", "protocol", *BASE),
    "tls": BASE,
    # pure
    "protocol": ("protocol", *PURE),
    "broker.sql_values": PURE,
    "broker.sql_screen": PURE,
    "broker.sql_nodes": ("broker.sql_screen", "broker.sql_values", *PURE),
    "broker.sql_filter": (
        *("broker.sql_nodes", "broker.sql_screen", "broker.sql_values"),
        *PURE,
    ),
    "broker.filters": ("broker.sql_filter", "protocol.records", *PURE),
    "broker.locks": PURE,
    "broker.stats": (*PURE, "telemetry"),
    "replication.in_sync": PURE,
    "controller.election": PURE,
    "broker": (),
    "client": (),
    # services: neither protocol nor net
    "broker.admission": SERVICE,
    "broker.settings_table": SERVICE,
    "broker.topics": ("broker.settings_table", *SERVICE),
    "broker.groups": ("broker.filters", "broker.settings_table", *SERVICE),
    "broker.long_polling": SERVICE,
    "broker.access": SERVICE,
    "broker.core": ("broker", *SERVICE),
    "broker.sending": (
        *("broker", "protocol.records", "protocol.record_runs", "storage.runs"),
        "protocol.lifetimes",
        *SERVICE,
    ),
    "broker.pulling": ("broker", *SERVICE),
    "broker.bulk": ("broker", "storage.bulk_reads", *SERVICE),
    "broker.metrics": (
        *("broker.browsing", "broker.delay_metrics", "broker.topic_metrics"),
        "broker.kafka_metrics",
        *("broker.pop_metrics", "broker.retry_metrics", "broker.transaction_metrics"),
        *BASE,
    ),
    "broker.topic_metrics": BASE,
    "broker.browsing": ("broker.core", "protocol.records", *SERVICE),
    "broker.offsets": SERVICE,
    "broker.topic_deletion": ("broker", *SERVICE),
    "broker.runtime_settings": ("broker", *SERVICE),
    "broker.attributes": PURE,
    "broker.replies": BUSINESS,
    "broker.reply_api": TRANSLATOR,
    "broker.priorities": ("protocol.records", *PURE),
    "broker.dedup_notes": ("storage.state", *BUSINESS),
    "broker.dedup": ("storage.state", *BUSINESS),
    "broker.memory_queues": BUSINESS,
    "broker.placing": ("broker", "protocol.record_runs", *BUSINESS),
    "broker.expiry": ("protocol.lifetimes", "storage.state", *BUSINESS),
    "broker.delay_forms": ("broker.topics", "protocol.records", *PURE),
    "broker.delay_firing": (
        *("broker.delay_forms", "protocol.records", "storage.copies", "storage.copy_tables"),
        *PURE,
    ),
    "broker.delay_units": ("broker.timer_index", "storage.queue_index", *SERVICE),
    "broker.delay_progress": ("storage.state", *BUSINESS),
    "broker.delay_rescue": BUSINESS,
    "broker.delay_desk": BUSINESS,
    "broker.delay_metrics": ("telemetry",),
    "broker.quick_commits": (
        *("broker.topics", "protocol.framing", "protocol.records", "protocol.remoting_fast"),
        *("storage.copies", "storage.lanes", "storage.queue_index", *PURE),
    ),
    "broker.quick_halves": (
        *("broker.half_messages", "broker.quick_delays", "broker.topics", "protocol.records"),
        *("storage.copies", *PURE),
    ),
    "broker.quick_delays": (
        *("broker.delay_forms", "broker.topics", "protocol.records", "storage.copies"),
        *PURE,
    ),
    "broker.retry_metrics": ("telemetry",),
    "broker.transaction_metrics": ("telemetry",),
    "broker.pop_metrics": ("telemetry",),
    "broker.delays": ("storage.copies", "storage.copy_tables", "storage.lanes", *BUSINESS),
    "broker.timer_index": PURE,
    "broker.allocation": PURE,
    "broker.offset_ranges": PURE,
    "broker.pop_state": ("broker.topics", *PURE),
    "broker.pop_entries": ("broker.pop_state", *PURE),
    "broker.pop_log": ("storage.state", *BUSINESS),
    "broker.pop_revive": BUSINESS,
    "broker.pop_taking": BUSINESS,
    "broker.pop_waiting": ("broker", *SERVICE),
    "broker.pops": BUSINESS,
    "broker.retry_policy": ("broker.groups", *PURE),
    "broker.retry_forms": ("broker.delay_forms", "broker.topics", "protocol.records", *PURE),
    "broker.retry_notes": ("protocol.kafka_entries", "storage.state", *BUSINESS),
    "broker.retries": BUSINESS,
    "broker.ordering": ("storage.state", *BUSINESS),
    "broker.half_messages": ("broker.delay_forms", "broker.topics", "protocol.records", *PURE),
    "broker.half_table": PURE,
    "broker.half_operations": BUSINESS,
    "broker.half_recovery": BUSINESS,
    "broker.transactions": ("storage.state", *BUSINESS),
    "broker.transaction_api": TRANSLATOR,
    "broker.dead_letters": BUSINESS,
    "broker.staged_entries": ("protocol.record_images", "storage.staging", *BUSINESS),
    "broker.staged_writes": (
        *("protocol.lifetimes", "protocol.message_batches", "protocol.record_images"),
        *("protocol.record_runs", "storage.images", "storage.lanes", "storage.staging"),
        *("storage.state", *BUSINESS),
    ),
    "broker.staged_api": TRANSLATOR,
    # translators: of the net they see the connection that a request came over, of the store its
    # tables' names
    "broker.remoting_api": TRANSLATOR,
    "broker.quick_sends": (*TRANSLATOR, "storage.copies", "storage.lanes"),
    "broker.send_api": TRANSLATOR,
    "broker.client_calls": TRANSLATOR,
    "broker.retry_api": TRANSLATOR,
    "broker.pop_api": TRANSLATOR,
    "broker.admin_api": TRANSLATOR,
    "broker.delay_api": TRANSLATOR,
    "broker.bulk_api": (*TRANSLATOR, "storage.bulk_reads"),
    "broker.admin_base": TRANSLATOR,
    "broker.admin_clients": TRANSLATOR,
    "broker.admin_groups": TRANSLATOR,
    "broker.admin_info": TRANSLATOR,
    "broker.admin_modes": TRANSLATOR,
    "broker.admin_topics": TRANSLATOR,
    "broker.kafka_api": TRANSLATOR,
    "broker.kafka_cluster_api": TRANSLATOR,
    "broker.kafka_broker_configs": ("storage.state", *TRANSLATOR),
    "broker.kafka_config_texts": TRANSLATOR,
    "broker.kafka_configs": TRANSLATOR,
    "broker.kafka_door": TRANSLATOR,
    "broker.kafka_fetch": TRANSLATOR,
    "broker.kafka_list_offsets": TRANSLATOR,
    "broker.kafka_log_api": (*TRANSLATOR, "storage.bulk_reads"),
    "broker.kafka_metadata": TRANSLATOR,
    "broker.kafka_produce": (*TRANSLATOR, "storage.lanes"),
    "broker.quick_produce": (*TRANSLATOR, "storage.whole_batches"),
    "broker.kafka_again": TRANSLATOR,
    "broker.kafka_fetch_again": TRANSLATOR,
    "broker.kafka_reading": TRANSLATOR,
    "broker.kafka_ahead": (
        *("broker.kafka_slices", "broker.kafka_together"),
        *("storage.mends", "storage.queue_index", *SERVICE),
    ),
    "broker.kafka_together": ("broker.kafka_slices", "storage.queue_index", *SERVICE),
    "broker.kafka_slices": ("protocol", "storage.queue_index", *SERVICE),
    "broker.kafka_topics": TRANSLATOR,
    "broker.kafka_delays": ("broker", "protocol", *SERVICE),
    "broker.kafka_unfolding": ("broker", "protocol", *SERVICE),
    "broker.kafka_sessions": PURE,
    "broker.kafka_waiting": ("broker.long_polling", *PURE),
    "broker.kafka_partitions": ("broker", "storage.state", *SERVICE),
    "broker.producer_states": (
        *("broker", "protocol", "storage.state", "storage.whole_batches"),
        *SERVICE,
    ),
    "broker.kafka_group_values": PURE,
    "broker.kafka_group_state": ("broker.kafka_group_values", "protocol.kafka_codes", *PURE),
    "broker.kafka_group": (
        *("broker.kafka_group_state", "broker.kafka_group_values", "protocol.kafka_codes"),
        *PURE,
    ),
    "broker.kafka_groups": (
        *("broker", "protocol.kafka_codes", "protocol.kafka_subscriptions", "storage.state"),
        *SERVICE,
    ),
    "broker.kafka_offsets": ("broker", "storage.state", *SERVICE),
    "broker.kafka_group_api": TRANSLATOR,
    "broker.kafka_admin_api": TRANSLATOR,
    "broker.kafka_metrics": ("telemetry",),
    "broker.kafka_offset_api": TRANSLATOR,
    "broker.kafka_transaction_api": TRANSLATOR,
    "broker.kafka_transaction_state": ("protocol.kafka_codes", *PURE),
    "broker.kafka_transactions": (
        *("broker", "protocol.kafka_batches", "protocol.kafka_codes", "storage.state"),
        *SERVICE,
    ),
    "broker.stable_offsets": PURE,
    "broker.kafka_queries": ("broker", "protocol", *SERVICE),
    "broker.queue_units": ("storage.queue_index", *SERVICE),
    "broker.topic_retention": ("broker", "storage.queue_index", "storage.state", *SERVICE),
    "broker.compaction_plan": ("broker", "storage.queue_index", *SERVICE),
    "broker.compaction": (
        *("broker", "protocol", "storage.compacted", "storage.queue_index"),
        *("storage.state", "storage.whole_batches", *SERVICE),
    ),
    "broker.registration": ("broker", "link", "protocol", *BASE),
    # links
    "replication.links": ("link", "net", "storage.store", "replication.in_sync", "protocol", *BASE),
    "controller.zookeeper": ("controller.election", *BASE),
    # processes
    "broker.server": (
        *("broker", "replication", "controller", "storage", "protocol", "link", "net", "tls"),
        *BASE,
    ),
    "nameserver": (
        *("nameserver", "protocol", "link", "net", "tls", "storage.files"),
        *("metrics_http", "process_metrics"),
        *BASE,
    ),
    # the client, and what is built on it
    "client.simple": ("client.core.signing", "link", "tls", "protocol", *BASE),
    "client.blocking": ("client.core.signing", "protocol", "tcp", *BASE),
    "client.commands": ("client.core.messages", "client.simple", "protocol", *BASE),
    "client.messages": ("client.simple", "protocol", *BASE),
    "client.group_checks": ("client.simple", "protocol", *BASE),
    "client.admin": (*("client.simple", "client.messages", "client.group_checks"), *ADMIN),
    "client.printing": BASE,
    "client.administration": (
        *("client.admin", "client.administration", "client.aio.address_server", "client.core"),
        *("client.group_checks", "client.messages", "client.simple"),
        *ADMIN,
    ),
    "client.admin_flags": (*("client.administration", "client.printing", "client.simple"), *ADMIN),
    "client.admin_topics": ADMIN_COMMANDS,
    "client.admin_groups": ("client.admin_kafka", *ADMIN_COMMANDS),
    "client.admin_kafka": ADMIN_COMMANDS,
    "client.admin_consumers": ADMIN_COMMANDS,
    "client.admin_offsets": ADMIN_COMMANDS,
    "client.admin_messages": ADMIN_COMMANDS,
    "client.admin_dead_letters": ADMIN_COMMANDS,
    "client.admin_delayed": ADMIN_COMMANDS,
    "client.admin_transactions": ADMIN_COMMANDS,
    "client.admin_queries": ("client.admin_messages", *ADMIN_COMMANDS),
    "client.admin_brokers": ADMIN_COMMANDS,
    "client.admin_main": ("client", *BASE),
    "client.top_data": ("client.admin", "protocol", *BASE),
    "client.top_text": ("client.top_data", *BASE),
    "client.top": (
        *("client.administration", "client.simple", "client.top_data", "client.top_text"),
        *BASE,
    ),
    "client.core": ("client.core", "protocol", *BASE),
    "client.aio": ("client.aio", "client.core", "link", "net", "protocol", *BASE),
    "client.sync": ("client.aio", "client.core", "client.sync", "link", "protocol", "tcp", *BASE),
    "client.sync.admin": ("client", "protocol", *BASE),
    "aio": ("client",),
    "collector": ("client", "collector", *BASE),
    "console": ("client", *BASE),
    "spark": ("client", "protocol", "spark", "tls", *BASE),
    "spark.options": ("broker.sql_filter", "spark", *BASE),  # a filter's faults, before any broker
    "pipelines": ("client", "pipelines", "spark", "tables", *BASE),
    "tables": ("spark.options", "tables", *BASE),
    "replay": ("client", "protocol", "replay", "spark", *BASE),
    "demo": ("storage.blocking", "protocol.records", *BASE),
    "serve": (
        *("broker.server", "heap", "nameserver", "metrics_http", "process_metrics"),
        *("link", "net", "tls"),
        *BASE,
    ),
    "cli": (
        *("client", "collector", "demo", "pipelines", "replay", "serve", "nameserver"),
        *("storage.inspect", "tables.command"),
        *BASE,
    ),
    "__main__": ("cli",),
    "pages": ("config", "protocol"),
    # what tests of users get: it may look into everything, and nothing may import it
    "testing": (
        *("aio", "broker", "client", "nameserver", "net", "protocol", "storage.files", "testing"),
        *BASE,
    ),
    "testing.plugin": ("testing",),
}

NOT_IN_PROTOCOL = {"asyncio", "io", "logging", "os", "pathlib", "random", "select", "socket", "ssl"}
NOT_IN_PROTOCOL |= {"subprocess", "tempfile", "threading", "time"}
NOT_IN_STORAGE = {"http", "socket", "ssl", "urllib"}
NOWHERE = {"dill", "marshal", "pickle", "shelve"}
# Third-party packages, and the places that may import them (None: any).
THIRD_PARTY: dict[str, str | tuple[str, ...] | None] = {
    "isal": None,
    "numpy": None,
    "orjson": None,
    "uvloop": None,
    "pytest": "testing.plugin",
    "cramjam": "protocol.kafka_batches",
    "crc32c": "protocol.kafka_batches",
    "kio": "protocol.kafka",
    "fastavro": "tables.avro_rows",
    "kazoo": "controller.zookeeper",
    "pyarrow": ("spark", "replay", "tables"),
    "pyspark": ("spark", "pipelines", "tables"),
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}


def row_of(module: str) -> tuple[str, ...] | None:
    """What a module may import: its own row, its tier, or the row of the package around it."""
    package, _, name = module.partition(".")
    if package == "storage":
        if not name:
            return ()
        for index, tier in enumerate(STORAGE_TIERS):
            if name in tier:
                below = tuple(f"storage.{n}" for t in STORAGE_TIERS[:index] for n in t)
                return (*below, *STORED, *BASE)
        return None
    while module:
        if module in MAY_IMPORT:
            return MAY_IMPORT[module]
        module = module.rpartition(".")[0]
        if module in {"broker", "client", "controller", "replication"}:
            return None  # these have a row for each module
    return MAY_IMPORT[""] if not name and not package else None


def imported(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from p import m` names p.m."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner.removeprefix("sluice.") in known else node.module


def only_for_types(tree: ast.Module) -> set[int]:
    """Lines of imports under `if TYPE_CHECKING:`: names for annotations, absent when it runs."""
    return {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in node.body
    }


def is_within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


def places_of(package: str, anywhere: str) -> tuple[str, ...]:
    """Which modules may import a package of others."""
    places = THIRD_PARTY[package] or anywhere
    return (places,) if isinstance(places, str) else places


def import_problems(file: SourceFile, known: set[str]) -> Iterator[str]:
    row = row_of(file.module)
    if row is None:
        yield f"{file.path}: has no row in MAY_IMPORT or STORAGE_TIERS"
        return
    package = file.module.partition(".")[0]
    types = only_for_types(file.tree)
    for line, name in imported(file.tree, known):
        place, top = f"{file.path}:{line}", name.partition(".")[0]
        if line in types and is_within(name, f"sluice.{package}"):
            continue  # a part may name the type of the whole that it works for
        if top == "sluice":
            target = name.removeprefix("sluice").lstrip(".")
            if not any(is_within(target, allowed) for allowed in row):
                yield f"{place}: {file.module or 'sluice'} may not import {target or 'sluice'}"
            elif (
                is_within(target, "storage")
                and package != "storage"
                and target not in STORAGE_PUBLIC
            ):
                yield f"{place}: {target} is private to storage/"
        elif top in NOWHERE:
            yield f"{place}: {top} is never used here"
        elif top in sys.stdlib_module_names:
            if package == "protocol" and top in NOT_IN_PROTOCOL:
                yield f"{place}: protocol/ may not import {top}"
            if package == "storage" and top in NOT_IN_STORAGE:
                yield f"{place}: storage/ may not import {top}"
        elif top not in THIRD_PARTY:
            yield f"{place}: {top} is not a dependency"
        elif not any(is_within(file.module, allowed) for allowed in places_of(top, file.module)):
            yield f"{place}: only {THIRD_PARTY[top]} may import {top}"


def call_problems(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in BANNED_CALLS:
            yield f"{file.path}:{node.lineno}: {name}() is never used here"
        if any(word.arg == "shell" for word in node.keywords):
            yield f"{file.path}:{node.lineno}: no process is started through a shell"


def sources() -> list[SourceFile]:
    return python_files("src/sluice")


def test_every_module_imports_only_what_its_row_allows() -> None:
    known = {file.module for file in sources()}
    report(p for file in sources() for p in import_problems(file, known))


def test_no_dangerous_calls() -> None:
    report(p for file in sources() for p in call_problems(file))


def test_the_check_finds_each_kind_of_mistake() -> None:
    known = {"storage.files", "storage.flush", "storage.store", "cli", "protocol.records"}

    def problems(path: str, text: str) -> str:
        file = SourceFile(f"src/sluice/{path}", text)
        return " ".join([*import_problems(file, known), *call_problems(file)])

    assert "has no row" in problems("surprise.py", "")
    assert "has no row" in problems("storage/surprise.py", "")
    assert "has no row" in problems("broker/surprise.py", "")
    assert "may not import storage.store" in problems(
        "storage/flush.py", "import sluice.storage.store"
    )
    assert "may not import storage.store" in problems(
        "storage/flush.py", "def f() -> None:\n    from sluice.storage import store\n"
    )
    assert "may not import cli" in problems("errors.py", "from sluice.cli import main")
    assert "private to storage" in problems("broker/server.py", "from sluice.storage import flush")
    assert "protocol/ may not import time" in problems("protocol/records.py", "import time")
    assert "storage/ may not import socket" in problems("storage/files.py", "import socket")
    assert "pickle is never" in problems("model.py", "from pickle import loads")
    assert "requests is not" in problems("net.py", "import requests")
    assert "only controller.zookeeper" in problems("net.py", "import kazoo.client")
    assert "eval() is never" in problems("model.py", "eval('1')")
    assert "os.system() is never" in problems("net.py", "import os\nos.system('x')")
    assert "through a shell" in problems("net.py", "run('x', shell=True)")
    assert problems("storage/store.py", "from sluice.storage import flush\nimport isal") == ""
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
    assert problems("storage/flush.py", types + "from sluice.storage.store import Store") == ""
    assert "may not import" in problems("storage/flush.py", types + "from sluice.cli import main")
    assert problems("__init__.py", "from sluice._version import __version__") == ""


def test_every_module_is_used() -> None:
    """A module that nothing imports is dead, or its test is missing."""
    entries = {"", "__main__", "cli", "testing.plugin"}
    known = {file.module for file in sources()}
    used: set[str] = set()
    for file in python_files():
        for _, name in imported(file.tree, known):
            module = name.removeprefix("sluice.")
            while name.startswith("sluice") and module:
                used.add(module)
                module = module.rpartition(".")[0]
    report(f"{module}: is imported by nothing" for module in known - used - entries)
