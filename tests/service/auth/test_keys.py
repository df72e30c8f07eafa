"""Tests of API keys: how the server reads them from files and the environment, creates them, looks them up, limits
their rates, and reloads them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.service.engine_harness import Clock
from wane.service.auth.keyring import Keyring, KeySource, Principal, TokenBucket
from wane.service.auth.keys import Key, KeysError, Permission, digest, make_key, of_file, of_text, weak
from wane.service.errors import RateLimited, Unauthorized
from wane.service.settings import Settings, SettingsError

ALICE = "alice's-key-0123456789"
HEX = digest(b"key").hex()


def line(name: str, key: str, options: str = "") -> str:
    return f"{name}:sha256:{digest(key.encode()).hex()} {options}\n"


def principal(keyring: Keyring, key: str) -> Principal:
    found = keyring.find(key.encode())
    assert found is not None
    return found


def test_a_file_has_a_line_for_each_key_with_its_options() -> None:
    text = f"# ours\n\n{line('alice', 'a')}{line('alice', 'b', 'scope=use+metrics  # temporary')}"
    keys = of_file(text + line("bob", "c", "rate=2.5 burst=10 sessions=7"))
    assert [(key.name, key.digest) for key in keys] == [
        ("alice", digest(b"a")),
        ("alice", digest(b"b")),
        ("bob", digest(b"c")),
    ]
    assert [key.permissions for key in keys[:2]] == [{Permission.USE}, {Permission.USE, Permission.METRICS}]
    assert (keys[2].rate, keys[2].burst, keys[2].sessions) == (2.5, 10, 7)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("alice\n", "line 1: it must begin with NAME:sha256:"),
        (f"\nalice:md5:{HEX}\n", "line 2: it must begin"),
        (f"alice:sha256:{HEX[:-1]}\n", "line 1: it must begin"),
        (f"alice:sha256:{HEX.upper()}\n", "line 1: it must begin"),
        (f"alice:sha256:{HEX}:use\n", "line 1: it must begin"),
        (f"a/b:sha256:{HEX}\n", "line 1: a name must be"),
        (f":sha256:{HEX}\n", "line 1: a name must be"),
        (f"alice:sha256:{HEX} use\n", "alice has an unknown option"),
        (f"alice:sha256:{HEX} scope=root\n", "alice has an unknown scope; the scopes are use, metrics, admin"),
        (f"alice:sha256:{HEX} rate=0\n", "alice has a rate that is not a number above 0"),
        (f"alice:sha256:{HEX} rate=nan\n", "alice has a rate that is not a number above 0"),
        (f"alice:sha256:{HEX} rate=1 rate=2\n", "alice has rate twice"),
        (f"alice:sha256:{HEX} burst=2\n", "alice has a burst, but no rate"),
        (f"alice:sha256:{HEX} sessions=1.5\n", "is not a whole number"),
        (f"alice:sha256:{HEX}\nbob:sha256:{HEX}\n", "it lists a key twice"),
        ("# none yet\n", "it contains no keys"),
        (f"alice:sha256:{HEX}\nprom:sha256:{HEX}", "line 2: it does not end in a newline"),
        (f"alice:sha256:{HEX} rate=1", "line 1: it does not end in a newline"),
        (f"alice:sha256:{HEX}\n#", "line 2: it does not end in a newline"),
        ("", "it contains no keys"),
    ],
)
def test_an_invalid_key_file_is_refused_with_the_line(text: str, why: str) -> None:
    with pytest.raises(KeysError) as caught:
        of_file(text)
    assert why in str(caught.value)
    assert HEX not in str(caught.value)


def test_the_environment_has_names_keys_and_optional_scopes() -> None:
    alice, ops = of_text(f"alice:{ALICE.replace(chr(39), '')}, ops:open+sesame/==:admin+use")
    assert (alice.name, alice.permissions) == ("alice", frozenset({Permission.USE}))
    assert (ops.digest, ops.permissions) == (digest(b"open+sesame/=="), frozenset({Permission.ADMIN, Permission.USE}))


@pytest.mark.parametrize("text", ["", ",", "hush-hush", "a:", "a:hush hush", "a:hush-hush:root", "a b:hush"])
def test_an_error_about_the_environment_contains_no_key(text: str) -> None:
    with pytest.raises(KeysError, match=r"^WANE_API_KEYS: ") as caught:
        KeySource(Settings.read({"WANE_API_KEYS": text}))
    assert "hush" not in str(caught.value)


def test_settings_show_no_secret() -> None:
    settings = Settings.read({"WANE_API_KEYS": "alice:hush-hush", "WANE_STORE": "redis://u:hush@h/0?password=hush"})
    assert "hush" not in repr(settings) + str(settings)
    with pytest.raises(SettingsError) as caught:
        Settings.read({"WANE_STORE": "http://u:hush@h/0?db=1&password=hush&x=1"})
    assert "hush" not in str(caught.value)


def test_a_short_key_is_reported_with_its_name() -> None:
    assert weak("alice:short,bob:" + "x" * 20) == ["alice"]


def test_new_keys_are_unique_and_their_lines_identify_them() -> None:
    made, kept = make_key("alice", ["scope=use+metrics", "rate=2.5", "burst=5", "sessions=3"])
    assert of_file(f"{kept.line()}\n") == [kept]
    assert made not in kept.line()
    assert principal(Keyring([kept]), made).key == kept
    assert len({make_key("alice")[0] for _ in range(100)}) == 100
    assert len(made) >= 43  # 256 random bits take 43 characters of base64


def test_an_unknown_key_is_not_found() -> None:
    keyring = Keyring(of_text("alice:one,bob:two"))
    assert principal(keyring, "two").owner.name == "bob"
    for wrong in (b"", b"on", b"onee", b"ONE", b"alice:one", digest(b"one"), digest(b"one").hex().encode()):
        assert keyring.find(wrong) is None


def test_a_key_that_matches_half_of_a_digest_is_refused() -> None:
    key = Key("alice", digest(b"one")[:16] + bytes(16))
    assert Keyring([key]).find(b"one") is None


def test_a_rate_limits_requests_and_the_burst_is_refilled() -> None:
    clock = Clock()
    alice = principal(Keyring(of_file(line("alice", "a", "rate=2 burst=4")), partial(TokenBucket, clock=clock)), "a")
    for _ in range(4):
        alice.charge(1)
    with pytest.raises(RateLimited) as caught:
        alice.charge(1)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now_s += 1
    alice.charge(2)
    with pytest.raises(RateLimited):
        alice.charge(1)


def test_a_call_larger_than_the_burst_is_granted_if_the_bucket_is_full_and_leaves_a_debt() -> None:
    clock = Clock()
    alice = principal(Keyring(of_file(line("alice", "a", "rate=10 burst=10")), partial(TokenBucket, clock=clock)), "a")
    alice.charge(50)
    with pytest.raises(RateLimited) as caught:
        alice.charge(1)
    assert caught.value.retry_after_s == pytest.approx(4.1)
    clock.now_s += 4.1
    alice.charge(1)


def test_a_charge_in_two_parts_is_taken_completely_or_not_at_all() -> None:
    clock = Clock()
    alice = principal(Keyring(of_file(line("alice", "a", "rate=10 burst=10")), partial(TokenBucket, clock=clock)), "a")
    alice.charge(1)
    alice.charge(49, before=1)
    clock.now_s += 4.5  # the bucket now holds 5 of at most 10 requests
    alice.charge(1)
    with pytest.raises(RateLimited) as caught:
        alice.charge(49, before=1)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now_s += 0.5
    alice.charge(1)
    alice.charge(49, before=1)


def test_the_default_burst_is_one_second_and_at_least_one_request() -> None:
    clock = Clock()
    slow = principal(Keyring(of_file(line("alice", "a", "rate=0.5")), partial(TokenBucket, clock=clock)), "a")
    slow.charge(1)
    with pytest.raises(RateLimited):
        slow.charge(1)


def test_keys_that_are_also_in_the_new_file_keep_their_buckets() -> None:
    clock = Clock()
    keyring = Keyring(
        of_file(line("alice", "a", "rate=1 burst=5") + line("bob", "b")), partial(TokenBucket, clock=clock)
    )
    alice, bob = principal(keyring, "a"), principal(keyring, "b")
    alice.charge(5)
    keyring.replace(of_file(line("alice", "a", "rate=1 burst=3 scope=admin") + line("alice", "c")))
    assert keyring.find(b"b") is None
    assert principal(keyring, "a") is alice and alice.key.may(Permission.METRICS)
    assert principal(keyring, "c").owner == alice.owner
    with pytest.raises(RateLimited):
        alice.charge(1)
    with pytest.raises(Unauthorized):  # an open WebSocket could still charge the removed key
        bob.charge(1)


@pytest.mark.parametrize("change", ["scope=metrics", "to zoe"])
def test_a_reduced_or_renamed_key_has_a_new_holder_with_the_same_bucket(change: str) -> None:
    keyring = Keyring(
        of_file(line("alice", "a", "rate=1 burst=5 scope=use+metrics")), partial(TokenBucket, clock=Clock())
    )
    alice = principal(keyring, "a")
    alice.charge(5)
    name, scope = ("zoe", "use+metrics") if change == "to zoe" else ("alice", "metrics")
    keyring.replace(of_file(line(name, "a", f"rate=1 burst=5 scope={scope}")))
    with pytest.raises(Unauthorized):  # an open WebSocket could still charge the old version of the key
        alice.charge(1)
    assert principal(keyring, "a").owner.name == name
    with pytest.raises(RateLimited):
        principal(keyring, "a").charge(1)


def test_a_key_with_more_permissions_keeps_its_holder() -> None:
    keyring = Keyring(of_file(line("alice", "a")))
    alice = principal(keyring, "a")
    for options in ("scope=use+metrics", "scope=admin", "scope=admin sessions=3"):
        keyring.replace(of_file(line("alice", "a", options)))
        assert principal(keyring, "a") is alice
        alice.charge(1)
    keyring.replace(of_file(line("alice", "a", "scope=use+metrics")))
    assert principal(keyring, "a") is not alice


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(line("alice", "a"))
    return path


def replace(path: Path, text: str) -> None:
    """Replaces the key file atomically."""
    part = path.with_name("part")
    part.write_text(text)
    part.replace(path)


def opened(path: Path, others: str | None = None) -> tuple[KeySource, Keyring]:
    source = KeySource(Settings(api_keys_file=path, api_keys=None if others is None else SecretStr(others)))
    assert source.keyring is not None
    return source, source.keyring


def names(keyring: Keyring) -> set[str]:
    return {key for key in "abc" if keyring.find(key.encode()) is not None}


def test_a_changed_file_is_read_after_it_has_settled(path: Path) -> None:
    source, keyring = opened(path, "ops:c")
    replace(path, line("alice", "b"))
    source.look()
    assert names(keyring) == {"a", "c"}
    source.look()
    assert names(keyring) == {"b", "c"}


def test_a_file_that_is_being_written_is_not_read(path: Path) -> None:
    source, keyring = opened(path)
    for number in range(3):
        path.write_text(line("alice", "b") + "#" * number)
        source.look()
        assert names(keyring) == {"a"}


@pytest.mark.parametrize("at_once", [False, True], ids=["looked-at", "SIGHUP"])
def test_a_truncated_file_changes_no_key(path: Path, caplog: pytest.LogCaptureFixture, at_once: bool) -> None:
    whole = line("alice", "a") + line("bob", "b", "rate=100 sessions=1 scope=metrics")
    path.write_text(whole)
    source, keyring = opened(path)
    before = principal(keyring, "b").key
    for end in range(len(line("alice", "a")) + 1, len(whole)):
        path.write_text(whole[:end])
        if at_once:
            source.reload()
        else:
            source.look()
            source.look()
        assert principal(keyring, "b").key == before
    assert "and may be truncated" in caplog.text


@pytest.mark.parametrize("broken", ["alice\n", "", "# none\n", f"alice:sha256:{HEX} rate=fast\n"])
def test_an_invalid_file_leaves_the_keys_unchanged_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    source, keyring = opened(path)
    replace(path, broken)
    for _ in range(5):
        source.look()
    assert names(keyring) == {"a"}
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "the keys stay as they are" in record.getMessage()
    replace(path, line("alice", "b"))
    source.look()
    source.look()
    assert names(keyring) == {"b"}


def test_a_missing_file_leaves_the_keys_unchanged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, keyring = opened(path)
    text = path.read_text()
    path.unlink()
    for _ in range(4):
        source.look()
    assert names(keyring) == {"a"}
    assert len(caplog.records) == 1
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    source.look()
    source.look()
    assert names(keyring) == {"a"}


def test_a_reload_reads_the_file_immediately(path: Path) -> None:
    source, keyring = opened(path)
    replace(path, line("alice", "b"))
    source.reload()
    assert names(keyring) == {"b"}


def test_an_unreadable_file_at_startup_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        opened(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysError, match="is not UTF-8 text"):
        opened(tmp_path / "binary")
