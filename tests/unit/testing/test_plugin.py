"""This module tests the plugin as a project meets it: with a pytest and a directory of its own."""

from __future__ import annotations

import pytest

pytest_plugins = ("pytester",)

# A loop that tests share and that outlives each of them, as plugins for asyncio have it.
ASYNC_CONFTEST = """
import asyncio
import inspect

import pytest


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    arguments["runner"].run(pyfuncitem.obj(**arguments))
    return True
"""

ASYNC_TESTS = """
from sluice import Message


async def test_closed_by_its_loop(sluice_broker, sluice_clock, runner):
    producer = await sluice_broker.aio_producer()
    seen = []

    async def handle(message):
        seen.append(message.body)

    await sluice_broker.aio_consumer("later", handle)
    await producer.send(Message("later", "hello", delay_seconds=3600))
    await sluice_clock.aio_advance(hours=1)
    assert seen == [b"hello"]


async def test_closed_before_its_loop(runner, sluice_broker):
    producer = await sluice_broker.aio_producer()
    await producer.send(Message("now", "hello"))
    assert len(sluice_broker.messages("now")) == 1
"""

PLAIN_TESTS = """
import pytest

from sluice import Message


@pytest.mark.parametrize("number", range(4))
def test_each_has_its_own(sluice_broker, number):
    sluice_broker.producer().send(Message("orders", f"{number}"))
    assert [message.body for message in sluice_broker.messages("orders")] == [b"%d" % number]


@pytest.mark.parametrize("number", range(4))
def test_one_for_all(sluice_shared_broker, number):
    sluice_shared_broker.producer().send(Message("orders", f"{number}"))
    assert b"%d" % number in {each.body for each in sluice_shared_broker.messages("orders")}
"""

WRONG_TESTS = """
import pytest


@pytest.mark.sluice(retention_hour=3)
def test_unknown(sluice_broker):
    pass


@pytest.mark.sluice("async")
def test_without_a_name(sluice_broker):
    pass


@pytest.mark.sluice(flush="async")
def test_right(sluice_broker):
    assert sluice_broker.config.store.flush == "async"
"""

INNOCENT_TESTS = """
import sys


def test_nothing_is_imported():
    heavy = ("asyncio", "numpy", "orjson", "uvloop", "sluice.broker", "sluice.testing.site")
    assert [name for name in heavy if name in sys.modules] == []


def test_no_module_of_ours_is_rewritten():
    import sluice.errors

    assert "rewrite" not in type(sluice.errors.__spec__.loader).__module__
"""


def test_tests_on_several_workers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLAIN_TESTS)
    result = pytester.runpytest_subprocess("-W", "error", "--assert=plain", "-n", "2")
    result.assert_outcomes(passed=8)


def test_tests_with_a_loop_and_tests_with_wrong_markers(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(ASYNC_CONFTEST)
    pytester.makepyfile(test_async=ASYNC_TESTS, test_wrong=WRONG_TESTS)
    result = pytester.runpytest_subprocess(
        *("-W", "error", "--strict-markers", "--assert=plain", "-p", "no:xdist")
    )
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "*no setting is called retention_hour; did you mean retention_hours?*",
            "*takes settings by name, not 'async'*",
        ]
    )


def test_a_project_that_does_not_use_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(INNOCENT_TESTS)
    result = pytester.runpytest_subprocess(
        *("-W", "error", "-p", "no:xdist", "-p", "no:hypothesispytest")
    )
    result.assert_outcomes(passed=2)


def test_fixtures_and_marker_explain_themselves(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--fixtures", "--assert=plain", "-p", "no:xdist")
    result.stdout.fnmatch_lines_random(
        [
            "sluice_broker -- *",
            "    A broker and its nameserver, running in this process, for one test.",
            "sluice_broker_factory -- *",
            "sluice_shared_broker -- *",
            "sluice_clock -- *",
            "sluice_faults -- *",
        ]
    )
    result.stdout.no_fnmatch_line("*_sluice_*")
    assert not result.stderr.lines
