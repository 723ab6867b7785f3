"""This module tests the configuration: every view, its units, its limits, its error messages."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import (
    BrokerConfig,
    Loaded,
    NameserverConfig,
    StoreConfig,
    add_flags,
    load,
    loads,
    properties,
    settings_markdown,
    settings_of,
    to_properties,
    to_toml,
    update,
)
from sluice.config.kinds import GIB, KIB, MIB, parse_delay_levels
from sluice.config.rocketmq import BROKER_INERT, FIXED, NAMESERVER_INERT
from sluice.config.settings import Setting, build
from sluice.config.views import FILE_BYTES_MAX, foreign_names
from sluice.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def toml(text: str) -> BrokerConfig:
    return loads(BrokerConfig, text, "sluice.toml").config


def conf(text: str) -> Loaded[BrokerConfig]:
    return loads(BrokerConfig, text, "broker.conf")


def flags(*arguments: str, kind: type[Any] = BrokerConfig) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, kind)
    return parser.parse_args(arguments)


def complaint_of(text: str, name: str) -> str:
    try:
        loads(BrokerConfig, text, name)
    except ConfigError as error:
        return str(error)
    return ""


def refusal(text: str, name: str = "sluice.toml") -> str:
    message = complaint_of(text, name)
    assert message
    assert "\n" not in message
    return message


# The objects ------------------------------------------------------------------------------------


def test_the_defaults_of_the_store_are_rocketmqs_where_it_has_them() -> None:
    store = StoreConfig()
    assert store.segment_bytes == GIB
    assert store.queue_file_units * 20 == 6_000_000
    assert (store.flush, store.flush_interval_ms) == ("sync", 500)  # sync: the one that differs
    assert store.flush_thorough_interval_ms == 10_000
    assert (store.retention_hours, store.retention_hours_of_day) == (72, (4,))
    ratios = (store.disk_clean_ratio, store.disk_force_ratio, store.disk_refuse_ratio)
    assert ratios == (0.75, 0.85, 0.90)
    assert store.key_index_file_bytes == 420_000_040
    assert store.properties_bytes_max == 32767
    assert len(store.delay_levels_ms) == 18
    assert (store.delay_levels_ms[0], store.delay_levels_ms[17]) == (1000, 7_200_000)


def test_a_process_listens_on_loopback_by_default() -> None:
    assert BrokerConfig().listen_host == "127.0.0.1"
    assert BrokerConfig().client_host == "127.0.0.1"
    assert NameserverConfig().listen_host == "127.0.0.1"
    assert BrokerConfig(advertised_host="10.0.0.7").client_host == "10.0.0.7"


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BrokerConfig().listen_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"segment_bytes": 4095},
            "segment_bytes: 4095 is out of limits; allowed: 4KiB to 2147483647",
        ),
        ({"segment_bytes": 2**31}, "segment_bytes"),
        ({"segment_bytes": True}, "segment_bytes: True is not a size"),
        ({"segment_bytes": "1GiB"}, "segment_bytes: '1GiB' is not a size"),
        ({"flush": "never"}, "flush: 'never' is not known; allowed: sync, async"),
        ({"disk_clean_ratio": 1.01}, "disk_clean_ratio: 1.01 is out of limits"),
        ({"disk_clean_ratio": float("nan")}, "disk_clean_ratio"),
        ({"retention_at": "24"}, "retention_at: '24' is not a list of hours"),
        ({"delay_levels": "1s 2x"}, "delay_levels: '1s 2x' '2x' is not a delay"),
        ({"delay_levels": ""}, "delay_levels"),
        ({"directory": ""}, "directory: '' is empty"),
        ({"directory": "a\nb"}, "directory"),
        ({"directory": "x" * 4097}, "at most 4096 characters"),
        ({"key_index": 1}, "key_index: 1 is not a flag"),
        ({"key_index_slots": 500_000_000}, "key index files of 2400000040 bytes"),
    ],
)
def test_the_store_refuses_values_out_of_limits(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "a/b"])
def test_a_broker_name_that_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="broker_name"):
        BrokerConfig(broker_name=name)


@pytest.mark.parametrize("address", ["host", "host:0", "host:65536", "a b:1", ":1", "::1:1"])
def test_a_nameserver_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="nameserver_addresses"):
        BrokerConfig(nameserver_addresses=(address,))


def test_every_declaration_is_complete() -> None:
    for kind in (BrokerConfig, NameserverConfig):
        for name, setting in settings_of(kind).items():
            assert setting.complaint(setting.default) is None
            assert setting.doc.endswith("."), name
            assert setting.doc[0].isupper() or setting.doc.startswith("flush=async"), name
            numeric = type(setting.default) in (int, float)
            assert numeric == (setting.minimum is not None), name
            assert numeric == (setting.maximum is not None), name


def test_a_rocketmq_name_is_in_one_table_only() -> None:
    broker = [*foreign_names(BrokerConfig), *FIXED, *BROKER_INERT]
    nameserver = [*foreign_names(NameserverConfig), *NAMESERVER_INERT]
    assert len(broker) == len(set(broker))
    assert len(nameserver) == len(set(nameserver))


# TOML -------------------------------------------------------------------------------------------


def test_toml_takes_tables_dotted_keys_and_flat_keys() -> None:
    wanted = BrokerConfig(store=StoreConfig(segment_bytes=MIB), listen_port=1)
    assert toml('listen_port = 1\n[store]\nsegment_bytes = "1MiB"') == wanted
    assert toml("listen_port = 1\nstore.segment_bytes = 1_048_576") == wanted
    assert toml('listen_port = "1"\nsegment_bytes = "1048576"') == wanted
    assert toml("listen_port = 1\nstore = { segment_bytes = 1048576 }") == wanted


def test_toml_takes_its_own_types_and_text() -> None:
    assert toml("key_index = false").store.key_index is False
    assert toml('key_index = "off"').store.key_index is False
    assert toml("disk_refuse_ratio = 1").store.disk_refuse_ratio == 1.0
    both = ("a:1", "[::1]:2")
    assert toml('nameserver_addresses = ["a:1", "[::1]:2"]').nameserver_addresses == both
    assert toml('nameserver_addresses = "a:1; [::1]:2;"').nameserver_addresses == both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\nsegmnt_bytes = 1",
            "sluice.toml:2: segmnt_bytes: is not known; did you mean segment_bytes?",
        ),
        ("[store]\n\nflsh = 1", "sluice.toml:3: flsh: is not known; did you mean flush?"),
        ("[stor]\nx = 1", "sluice.toml:1: stor: is not known; did you mean "),
        ("[store]\nlisten_port = 1", "sluice.toml:2: listen_port: belongs above all tables"),
        (
            "fileReservedTime = 1",
            "fileReservedTime: is RocketMQ's name; here it is called retention_hours",
        ),
        (
            "flush_interval_ms = true",
            "flush_interval_ms: True is not a duration; allowed: 1ms to 24h",
        ),
        ("flush = 3", "sluice.toml:1: flush: 3 is not text; allowed: sync, async"),
        ("key_index = 1", "key_index: 1 is not a flag; allowed: true, false"),
        ("nameserver_addresses = [1]", "nameserver_addresses: (1,) is not text"),
        ("listen_port = 70000", "listen_port: 70000 is out of limits; allowed: 0 to 65535"),
        ("flush = 'sync'\n[store]\nflush = 'async'", "sluice.toml:3: flush: is set twice"),
        ("x = \n", "sluice.toml:1: is not TOML"),
        ("store = 3", "sluice.toml:1: store: is not known"),
    ],
)
def test_a_mistake_in_toml_is_one_line_with_its_place(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    assert len(refusal(f"listen_port = '{'9' * 5000}'")) < 200


# Units ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64KiB", 65536), ("64 kib", 65536), ("1GiB", GIB), ("16MiB", 16 * MIB)],
)
def test_sizes(text: str, size: int) -> None:
    assert toml(f"segment_bytes = '{text}'").store.segment_bytes == size


@pytest.mark.parametrize("text", ["", "1KB", "1.5GiB", "-1", "GiB", "1GiBi", "9" * 30, "0x10", "٣"])
def test_what_is_not_a_size(text: str) -> None:
    assert "segment_bytes" in refusal(f"segment_bytes = '{text}'")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("flush_interval_ms", "250", 250),
        ("flush_interval_ms", "250ms", 250),
        ("flush_interval_ms", "2s", 2000),
        ("flush_interval_ms", "1m", 60_000),
        ("retention_hours", "48", 48),
        ("retention_hours", "48h", 48),
        ("retention_hours", "7d", 168),
        ("retention_hours", "120m", 2),
    ],
)
def test_durations(key: str, text: str, value: int) -> None:
    assert getattr(toml(f"{key} = '{text}'").store, key) == value


def test_a_duration_must_be_whole_in_its_unit() -> None:
    assert "'90m' is not a whole number of h" in refusal("retention_hours = '90m'")
    assert "is not a time" in refusal("retention_hours = '1w'")


def test_delay_levels_may_use_days() -> None:
    assert parse_delay_levels("1s 2d") == (1000, 172_800_000)
    with pytest.raises(ValueError, match="'1'"):
        parse_delay_levels("1")


# Environment, flags, precedence -----------------------------------------------------------------


def test_environment_variables() -> None:
    environ = {"SLUICE_SEGMENT_BYTES": "1MiB", "SLUICE_KEY_INDEX": "no", "PATH": "x"}
    loaded = load(BrokerConfig, environ=environ)
    assert (loaded.config.store.segment_bytes, loaded.config.store.key_index) == (MIB, False)
    assert loaded.origins["segment_bytes"] == "environment: SLUICE_SEGMENT_BYTES"


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean SLUICE_SEGMENT_BYTES"):
        load(BrokerConfig, environ={"SLUICE_SEGMENT_BYTE": "1MiB"})
    with pytest.raises(
        ConfigError, match="environment: SLUICE_LISTEN_PORT: 'x' is not a whole number"
    ):
        load(BrokerConfig, environ={"SLUICE_LISTEN_PORT": "x"})


def test_the_two_processes_share_an_environment() -> None:
    environ = {
        "SLUICE_LISTEN_PORT": "1",
        "SLUICE_NAMESERVER_LISTEN_PORT": "2",
        "SLUICE_NAMESERVER_ADDRESSES": "a:1",
        "SLUICE_PEER_CACHE": "x",
        "SLUICE_TEST_SEED": "1",
    }
    broker = load(BrokerConfig, environ=environ).config
    assert (broker.listen_port, broker.nameserver_addresses) == (1, ("a:1",))
    assert load(NameserverConfig, environ=environ).config.listen_port == 2
    with pytest.raises(ConfigError, match="did you mean SLUICE_NAMESERVER_LISTEN_HOST"):
        load(NameserverConfig, environ={"SLUICE_NAMESERVER_LISTEN_HOSTS": "x"})


def test_flags() -> None:
    given_flags = flags("--segment-bytes", "1MiB", "--no-key-index", "--retention-at=04;16")
    config = load(BrokerConfig, flags=given_flags).config
    assert config.store.segment_bytes == MIB
    assert config.store.key_index is False
    assert config.store.retention_hours_of_day == (4, 16)
    with pytest.raises(
        ConfigError, match=r"--listen-port: 'x' is not a whole number; allowed: 0 to"
    ):
        load(BrokerConfig, flags=flags("--listen-port", "x"))


def test_help_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags("--help")
    text = capsys.readouterr().out
    for name in settings_of(BrokerConfig):
        assert "--" + name.replace("_", "-") in text


def test_flags_override_environment_overrides_file_overrides_default(tmp_path: Path) -> None:
    file = tmp_path / "sluice.toml"
    file.write_text("listen_port = 1\nbroker_id = 1\nconnections_max = 1\n")
    environ = {"SLUICE_LISTEN_PORT": "2", "SLUICE_BROKER_ID": "2"}
    loaded = load(BrokerConfig, file=str(file), environ=environ, flags=flags("--listen-port=3"))
    config = loaded.config
    assert (config.listen_port, config.broker_id, config.connections_max) == (3, 2, 1)
    assert config.cluster_name == "DefaultCluster"
    assert loaded.origins == {
        "listen_port": "--listen-port",
        "broker_id": "environment: SLUICE_BROKER_ID",
        "connections_max": f"{file}:3: connections_max",
    }


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def message(name: str, data: bytes | None) -> str:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            load(BrokerConfig, file=str(path))
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "No such file" in message("missing.toml", None)
    assert "has no known ending" in message("sluice.yaml", b"")
    assert ":2: is not UTF-8" in message("latin.toml", b"#\n# \xe9")
    assert "is larger than" in message("large.toml", b"#" * (FILE_BYTES_MAX + 1))


# RocketMQ's file --------------------------------------------------------------------------------

REAL_LIFE = r"""
# An Apache broker's file, as people have them.
brokerClusterName = DefaultCluster
brokerName=broker-b
brokerId=0
namesrvAddr=10.0.0.1:9876;10.0.0.2:9876
defaultTopicQueueNums=4
autoCreateTopicEnable=false
autoCreateSubscriptionGroup=true
listenPort=10921
brokerIP1=10.0.0.3
! at night
deleteWhen=04;16
fileReservedTime=48
mapedFileSizeCommitLog=1073741824
mapedFileSizeConsumeQueue=6000000
diskMaxUsedSpaceRatio=88
storePathRootDir=/data/store
storePathCommitLog=/data/store/commitlog
storePathConsumeQueue=/data/store/consumequeue
storePathIndex=/data/store/index
storeCheckpoint=/data/store/checkpoint
abortFile=/data/store/abort
maxMessageSize=65536
brokerRole=SYNC_MASTER
flushDiskType=ASYNC_FLUSH
flushCommitLogLeastPages=4
flushConsumeQueueLeastPages=2
flushCommitLogThoroughInterval=10000
flushConsumeQueueThoroughInterval=60000
checkTransactionMessageEnable=false
sendMessageThreadPoolNums=128
pullMessageThreadPoolNums=128
transientStorePoolEnable=true
warmMapedFileEnable=true
useReentrantLockWhenPutMessage=true
aclEnable=false
messageDelayLevel=1s 5s \
                  1m 2h
"""


def test_a_real_life_broker_conf_just_works() -> None:
    loaded = conf(REAL_LIFE)
    config, store = loaded.config, loaded.config.store
    assert (config.broker_name, config.broker_id, config.broker_role) == (
        "broker-b",
        0,
        "sync-master",
    )
    assert config.nameserver_addresses == ("10.0.0.1:9876", "10.0.0.2:9876")
    assert (config.default_queue_count, config.auto_create_topics) == (4, "off")
    assert (config.listen_port, config.client_host) == (10921, "10.0.0.3")
    assert (store.retention_hours, store.retention_hours_of_day) == (48, (4, 16))
    assert (store.segment_bytes, store.queue_file_units) == (GIB, 300_000)
    assert (store.disk_clean_ratio, store.directory) == (0.88, "/data/store")
    assert (store.message_bytes_max, store.flush) == (64 * KIB, "async")
    assert store.delay_levels_ms == (1000, 5000, 60_000, 7_200_000)
    assert loaded.origins["retention_hours"] == "broker.conf:14: fileReservedTime"
    warned = "\n".join(loaded.warnings)
    for name in ("sendMessageThreadPoolNums", "transientStorePoolEnable", "abortFile"):
        assert warned.count(name) == 1
    assert "aclEnable" not in warned
    assert "no effect here: sendMessageThreadPoolNums, pullMessageThreadPoolNums (" in warned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\nfileReservdTime=1",
            "broker.conf:2: fileReservdTime: is not known; did you mean fileReservedTime?",
        ),
        ("fileReservedTime=2d", "broker.conf:1: fileReservedTime: '2d' is not a whole number"),
        ("fileReservedTime=0", "fileReservedTime: '0' is out of limits; allowed: 1h to"),
        (
            "flushDiskType=SYNC",
            "flushDiskType: 'SYNC' is not known (write SYNC_FLUSH, ASYNC_FLUSH)",
        ),
        ("mapedFileSizeConsumeQueue=21", "mapedFileSizeConsumeQueue: '21' is not a multiple of 20"),
        ("aclEnable=true", "aclEnable: 'true' is refused: access control is not in this version"),
        ("enableDLegerCommitLog=true", "enableDLegerCommitLog: 'true' is refused"),
        ("inSyncReplicas=2", "inSyncReplicas: '2' is refused: replication"),
        ("storePathCommitLog=/x", "storePathCommitLog: needs storePathRootDir"),
        ("storePathRootDir=/x\nstorePathCommitLog=/y", "allowed: /x/commitlog"),
        (
            "mapedFileSizeCommitLog=4096\nmappedFileSizeCommitLog=8192",
            "broker.conf:2: mappedFileSizeCommitLog: says otherwise than "
            "broker.conf:1: mapedFileSizeCommitLog; both mean segment_bytes",
        ),
        ("brokerName=\\u12", "broker.conf:1: \\u needs four hexadecimal digits"),
        ("segment_bytes=4096", "segment_bytes: is not known; did you mean "),
    ],
)
def test_a_mistake_in_broker_conf_is_one_line_with_its_place(text: str, message: str) -> None:
    assert message in refusal(text, "broker.conf")


def test_both_spellings_may_agree_and_the_last_of_equal_keys_counts() -> None:
    both = "mapedFileSizeConsumeQueue=20000\nmapperFileSizeBatchConsumeQueue=46000"
    assert conf(both).config.store.queue_file_units == 1000
    assert conf("brokerId=1\nbrokerId=2").config.broker_id == 2


def test_the_forced_deletion_can_be_switched_off_by_rocketmqs_name() -> None:
    assert conf("cleanFileForciblyEnable=false").config.store.disk_force_ratio == 1.0
    assert conf("cleanFileForciblyEnable=true").config.store.disk_force_ratio == 0.85


def test_the_nameserver_has_its_own_names() -> None:
    text = "listenPort=1\nserverChannelMaxIdleTimeSeconds=9\nkvConfigPath=/x\n"
    loaded = loads(NameserverConfig, text, "namesrv.conf")
    assert (loaded.config.listen_port, loaded.config.connection_idle_ms_max) == (1, 9000)
    assert len(loaded.warnings) == 1
    with pytest.raises(ConfigError, match="did you mean"):
        loads(NameserverConfig, "brokerName=x", "namesrv.conf")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=v", "v"),
        ("  k : v  ", "v"),
        ("k v", "v"),
        ("k\t=\tv w", "v w"),
        ("k=a\\\n   b", "ab"),
        ("k=a\\\\\n", "a\\"),
        ("k=a\\tb\\u0041\\q", "a\tbAq"),
        ("k=\\ud83d\\ude00", "\N{GRINNING FACE}"),
        ("#k=w\n!k=w\nk=v\r\n", "v"),
        ("k=a=b:c", "a=b:c"),
        ("k", ""),
        ("k=a\\", "a"),
        ("k=1\nk=2", "2"),
    ],
)
def test_properties_syntax(text: str, value: str) -> None:
    assert {key: entry.value for key, entry in properties.parse(text).items()} == {"k": value}


def test_escaped_separators_belong_to_the_key() -> None:
    assert properties.parse(r"a\ b\:c=d") == {"a b:c": properties.Entry("d", 1)}


@given(st.dictionaries(st.text(min_size=1), st.text().map(lambda text: text.rstrip(" \t\f"))))
def test_properties_written_are_read_back(values: dict[str, str]) -> None:
    read = {key: entry.value for key, entry in properties.parse(properties.render(values)).items()}
    assert read == values


@given(st.text())
def test_any_text_is_read_or_refused_as_properties(text: str) -> None:
    complaint = complaint_of(text, "broker.conf")
    assert not complaint or complaint.startswith("broker.conf:")


# Changes while running --------------------------------------------------------------------------


def test_a_dynamic_setting_can_be_changed_by_either_name() -> None:
    config = BrokerConfig()
    changed = update(config, {"fileReservedTime": "24", "flush_interval_ms": "1s"}).config
    assert (changed.store.retention_hours, changed.store.flush_interval_ms) == (24, 1000)
    assert config == BrokerConfig()
    assert update(config, {"sendMessageThreadPoolNums": "1"}).warnings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"listenPort": "1"}, "listenPort: takes effect at start only"),
        ({"directory": "/x"}, "directory: takes effect at start only"),
        ({"fileReservedTime": "x"}, "is not a whole number"),
        ({"fileReservdTime": "1"}, "did you mean fileReservedTime"),
    ],
)
def test_what_cannot_be_changed_while_running(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        update(BrokerConfig(), changes)


def test_naming_the_present_value_is_not_a_change() -> None:
    assert update(BrokerConfig(), {"listenPort": "10911"}).config == BrokerConfig()


# Round trips ------------------------------------------------------------------------------------

_SAMPLES: dict[str, st.SearchStrategy[Any]] = {
    "directory": st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=40),
    "retention_at": st.sampled_from(["04", "4;16", "00;12;23"]),
    "delay_levels": st.sampled_from(["1s", "1s 2m 3h 4d"]),
    "nameserver_addresses": st.lists(st.sampled_from(["a:1", "b.c:65535", "[::1]:9"])).map(tuple),
    "key_index_slots": st.integers(1, 1000),
    "key_index_entries": st.integers(2, 1000),
}


def _values(setting: Setting) -> st.SearchStrategy[Any]:
    if setting.name in _SAMPLES:
        return _SAMPLES[setting.name]
    if setting.choices:
        return st.sampled_from(setting.choices)
    if isinstance(setting.default, bool):
        return st.booleans()
    if isinstance(setting.default, float):  # whole percents: RocketMQ has no others
        return st.integers(10, 100).map(lambda percent: percent / 100)
    if isinstance(setting.default, int):
        return st.integers(int(setting.minimum or 0), int(setting.maximum or 0))
    return st.from_regex(r"[A-Za-z0-9_.-]{1,40}", fullmatch=True)


def configs(kind: type[Any]) -> st.SearchStrategy[Any]:
    one_each = {name: _values(setting) for name, setting in settings_of(kind).items()}
    return st.fixed_dictionaries({}, optional=one_each).map(lambda values: build(kind, values))


@given(configs(BrokerConfig))
def test_what_is_written_as_toml_is_read_back(config: BrokerConfig) -> None:
    assert toml(to_toml(config)) == config


@given(configs(NameserverConfig))
def test_what_is_written_as_toml_is_read_back_by_the_nameserver(config: NameserverConfig) -> None:
    assert loads(NameserverConfig, to_toml(config), "nameserver.toml").config == config


@given(configs(BrokerConfig))
def test_what_rocketmq_has_names_for_is_read_back_from_its_file(config: BrokerConfig) -> None:
    text = to_properties(config)
    read = conf(text)
    assert to_properties(read.config) == text
    assert read.warnings == ()
    for name in read.origins:
        holder = "store" if settings_of(BrokerConfig)[name].section else ""
        ours: Any = config.store if holder else config
        theirs: Any = read.config.store if holder else read.config
        assert getattr(ours, name) == getattr(theirs, name)


@given(st.text())
def test_any_text_is_read_or_refused_as_toml(text: str) -> None:
    complaint = complaint_of(text, "sluice.toml")
    assert not complaint or complaint.startswith("sluice.toml:")


# The page ---------------------------------------------------------------------------------------


def test_the_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_markdown(), "run script/check --fix"
