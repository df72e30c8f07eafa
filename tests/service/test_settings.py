from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from wane.service.settings import Settings, SettingsError


def read(*arguments: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    Settings.add_arguments(parser)
    return Settings.read(environment, parser.parse_args(arguments))


def test_settings_have_defaults() -> None:
    settings = read()
    assert settings == Settings()
    assert (settings.host, settings.port, settings.device) == ("127.0.0.1", 8000, "auto")


def test_the_command_line_overrides_the_environment() -> None:
    settings = read("--port", "9000", WANE_PORT="7000", WANE_HOST="0.0.0.0", PATH="/bin")
    assert (settings.port, settings.host) == (9000, "0.0.0.0")


def test_every_setting_is_an_option_and_a_variable() -> None:
    given = {
        "bundles": "/b",
        "device": "cpu",
        "console": "off",
        "prefix_states": "off",
        "require_all": "true",
        "check_invariants": "true",
        "log_level": "debug",
        "host": "h",
        "trusted_proxies": "10.0.0.0/8, ::1",
        "default_model": "m",
        "cors_origins": "https://shop.example",
        "session_ttl_s": "1.5",
        "shadow_rate": "0.5",
        "max_body_bytes": "4096",
        "receive_budget_bytes": "8192",
        "max_header_bytes": "4096",
        "max_answer_bytes": "2097152",
        "store": "memory",
        "store_policy": "tail",
    }
    values = {name: given.get(name, "7") for name in Settings.model_fields if name != "api_keys"}
    variables = {f"WANE_{name.upper()}": value for name, value in values.items()}
    arguments = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]
    arguments = [part for part in arguments if part != "true"]  # The options for these settings are flags.
    assert read(**variables) == read(*arguments)
    assert read(*arguments).bundles == Path("/b")
    assert read(*arguments).max_window == 7


@pytest.mark.parametrize("variable", ["WANE_PROT", "WANE_port", "WANE_", "WANE_MAX_BATCH_MS"])
def test_an_unknown_variable_is_fatal_and_named(variable: str) -> None:
    with pytest.raises(SettingsError, match=f"^{variable} is not a setting"):
        read(**{variable: "1"})


def test_the_variables_of_the_tests_are_ignored() -> None:
    assert read(WANE_DATA="/somewhere", WANE_REQUIRE_STACK="1") == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WANE_PORT", "http", "WANE_PORT is 'http': .*integer"),
        ("WANE_PORT", "65536", "WANE_PORT is '65536': .*65535"),
        ("WANE_DEVICE", "tpu", "WANE_DEVICE is 'tpu': .*'auto', 'cpu' or 'cuda'"),
        ("WANE_SESSION_TTL_S", "nan", "WANE_SESSION_TTL_S is 'nan'"),
        ("WANE_SESSION_TTL_S", "0", "WANE_SESSION_TTL_S is '0': .*greater than 0"),
        ("WANE_MAX_QUEUE", "", "WANE_MAX_QUEUE is ''"),
        ("WANE_SHADOW_RATE", "1.01", "WANE_SHADOW_RATE is '1.01': .*less than or equal to 1"),
        ("WANE_SHADOW_RATE", "-0.1", "WANE_SHADOW_RATE is '-0.1': .*greater than or equal to 0"),
        ("WANE_SHADOW_RATE", "nan", "WANE_SHADOW_RATE is 'nan'"),
    ],
)
def test_a_value_out_of_range_names_the_variable_and_the_limit(variable: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(**{variable: value})


def test_the_error_names_an_invalid_option() -> None:
    with pytest.raises(SettingsError, match="--max-batch-size is '0'"):
        read("--max-batch-size", "0")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1


def test_a_default_model_that_the_operator_chose_is_distinguished_from_the_setting_s_default() -> None:
    assert "default_model" not in read().model_fields_set
    assert "default_model" in read(WANE_DEFAULT_MODEL="gated-stable").model_fields_set


@pytest.mark.parametrize(
    "store",
    [
        "memory",
        "redis://h:1/0",
        "rediss://:p@h",
        "redis+cluster://h",
        "rediss+cluster://h:7000",
        "unix:///tmp/redis.sock",
    ],
)
def test_a_store_is_memory_or_redis(store: str) -> None:
    assert read(WANE_STORE=store).store == store


@pytest.mark.parametrize("store", ["", "disk", "redis://", "http://u:secret@h/0", "xredis://h"])
def test_the_error_of_an_invalid_address_contains_no_password(store: str) -> None:
    with pytest.raises(SettingsError, match=r"^WANE_STORE is ") as caught:
        read(WANE_STORE=store)
    assert "secret" not in str(caught.value)


def test_states_are_stored_for_uncertified_models_by_default() -> None:
    auto = Settings(store="redis://h", state_checkpoint_interval_tokens=8)
    assert (auto.states_every("m", certified=False), auto.states_every("m", certified=True)) == (8, None)
    mixed = Settings(store="redis://h", store_policy="state,m=tail,n=auto")
    assert [mixed.states_every(name, certified=True) for name in "lmn"] == [32, None, None]
    assert (
        Settings(store_policy="state").states_every("m", certified=False) is None
    )  # The memory store never stores states.


@pytest.mark.parametrize("policy", ["", "none", "tail,m", "tail,m=none", "m=tail", "tail,=state"])
def test_an_invalid_policy_is_refused(policy: str) -> None:
    with pytest.raises(SettingsError, match=r"^WANE_STORE_POLICY is "):
        read(WANE_STORE_POLICY=policy)


def test_the_checkpoint_interval_is_at_most_the_stored_history() -> None:
    with pytest.raises(
        SettingsError,
        match=r"^WANE_STATE_CHECKPOINT_INTERVAL_TOKENS is .9.:.* at most session_history_tokens, which is 8",
    ):
        read(WANE_STATE_CHECKPOINT_INTERVAL_TOKENS="9", WANE_SESSION_HISTORY_TOKENS="8")
