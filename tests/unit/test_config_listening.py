"""Settings of a process that listens: TLS by RocketMQ's names, and who may create topics."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.config import BrokerConfig, NameserverConfig, load, loads, to_properties
from sluice.errors import ConfigError
from sluice.net import Limits, limits_of
from tests.unit.test_config import conf, flags, refusal, toml


def test_rocketmqs_names_for_tls_are_read_by_both_processes() -> None:
    text = """
        tls.server.mode=enforcing
        tls.server.certPath=/etc/mq/server.pem
        tls.server.keyPath=/etc/mq/server.key
        tls.server.need.client.auth=require
        tls.server.trustCertPath=/etc/mq/clients.pem
        tls.enable=true
        tls.client.trustCertPath=/etc/mq/servers.pem
        tls.client.certPath=/etc/mq/me.pem
        tls.client.keyPath=/etc/mq/me.key
        tls.server.authClient=true
        tls.server.keyPassword=
        tls.test.mode.enable=false
    """
    for kind in (BrokerConfig, NameserverConfig):
        loaded = loads(kind, text, "tls.properties")
        config: Any = loaded.config
        assert (config.tls_mode, config.tls_certificate_file) == ("enforcing", "/etc/mq/server.pem")
        assert (config.tls_client_auth, config.tls_client_ca_file) == (
            "require",
            "/etc/mq/clients.pem",
        )
        assert (config.outgoing_tls, config.outgoing_tls_ca_file) == (True, "/etc/mq/servers.pem")
        assert config.outgoing_tls_key_file == "/etc/mq/me.key"
        assert ["tls.server.authClient" in line for line in loaded.warnings] == [True]
    assert conf("tls.server.mode=disabled").config.tls_mode == "off"
    assert conf("useTLS=true").config.outgoing_tls is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls.server.keyPassword=secret", "a key with a password is not read"),
        ("tls.test.mode.enable=true", "no certificate is made up"),
        ("tls.server.mode=maybe", "is not known (write permissive, enforcing, disabled)"),
    ],
)
def test_what_cannot_be_had_of_rocketmqs_tls_is_refused(text: str, message: str) -> None:
    assert message in refusal(text, "broker.conf")
    with pytest.raises(ConfigError, match=message.split("(", maxsplit=1)[0]):
        loads(NameserverConfig, text, "namesrv.conf")


@pytest.mark.parametrize(
    ("host", "switch", "creates"),
    [
        ("127.0.0.1", "auto", True),
        ("127.9.9.9", "auto", True),
        ("::1", "auto", True),
        ("localhost", "auto", True),
        ("0.0.0.0", "auto", False),  # noqa: S104
        ("::", "auto", False),
        ("10.0.0.1", "auto", False),
        ("mq.example.org", "auto", False),
        ("10.0.0.1", "on", True),
        ("127.0.0.1", "off", False),
    ],
)
def test_messages_create_topics_where_only_this_machine_connects(
    host: str, switch: Any, creates: bool
) -> None:
    config = BrokerConfig(listen_host=host, auto_create_topics=switch)
    assert config.creates_topics is creates


def test_a_switch_is_written_as_a_flag_or_left_alone() -> None:
    assert BrokerConfig().auto_create_topics == "auto"
    for text, value in (("true", "on"), ('"yes"', "on"), ("false", "off"), ('"auto"', "auto")):
        assert toml(f"auto_create_topics = {text}").auto_create_topics == value
    for arguments, value in (
        (["--auto-create-topics"], "on"),
        (["--auto-create-topics", "off"], "off"),
        (["--no-auto-create-topics"], "off"),
        (["--auto-create-topics=auto"], "auto"),
        ([], "auto"),
    ):
        assert load(BrokerConfig, flags=flags(*arguments)).config.auto_create_topics == value
    assert conf("autoCreateTopicEnable=true").config.auto_create_topics == "on"
    assert "autoCreateTopicEnable=false" in to_properties(BrokerConfig(auto_create_topics="off"))
    assert "'perhaps' is none of auto, on and off" in refusal("auto_create_topics = 'perhaps'")


def test_a_variable_of_the_tools_does_not_disturb_a_process() -> None:
    assert load(BrokerConfig, environ={"SLUICE_CLIENT_TLS": "1"}).origins == {}


def test_the_limits_of_a_listener_are_the_settings_of_its_process() -> None:
    assert limits_of(BrokerConfig()) == limits_of(NameserverConfig()) == Limits()
    for kind in (BrokerConfig, NameserverConfig):
        limits = limits_of(
            kind(
                connections_max=1,
                connections_per_address_max=2,
                frame_bytes_max=65_536,
                first_frame_ms=11,
                frame_ms=12,
                connection_idle_ms_max=1300,
                unsent_bytes_max=65_537,
                unsent_ms=14,
                tls_handshake_ms=15,
            )
        )
        assert limits == Limits(
            connections_max=1,
            connections_per_address_max=2,
            frame_bytes_max=65_536,
            first_frame_ms=11,
            frame_ms=12,
            idle_ms=1300,
            unsent_bytes_max=65_537,
            unsent_ms=14,
            tls_handshake_ms=15,
        )
