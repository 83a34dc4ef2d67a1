"""The key file: reading, changing, finding keys."""

from __future__ import annotations

import logging
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import KeyFileError
from swarm.gateway import api_keys
from swarm.gateway.api_keys import ApiKey, KeyFile, KeyLimits

HASH = "0" * 64


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.yaml"


def write(path, text):
    path.write_text(text)
    path.chmod(0o600)


def touch(path):
    """Make the file look changed, whatever the clock's resolution."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def test_each_secret_finds_its_key_and_no_other(path):
    limits = {"ann": KeyLimits(), "berta": KeyLimits(1, 2, 3)}
    secrets = {name: api_keys.add_key(path, name, wanted) for name, wanted in limits.items()}
    file = KeyFile.read(path)
    for name, secret in secrets.items():
        assert file.find(secret) == ApiKey(name, limits[name])
    assert len(set(secrets.values())) == 2
    assert all(len(secret) >= 50 for secret in secrets.values())  # 256 bits


@given(st.text(max_size=300))
def test_other_secrets_find_no_key(secret):
    assert KeyFile(None, {api_keys._sha256("right"): ApiKey("ann", KeyLimits())}, None).find("x" + secret) is None


def test_odd_secrets_find_no_key(path):
    for wrong in ["", "sk-swarm-", "x" * 100_000, "ä\udcff", HASH]:
        write(path, f"keys: {{ann: {{sha256: '{HASH}'}}}}")
        assert KeyFile.read(path).find(wrong) is None


def test_a_changed_file_is_read_again(path):
    api_keys.add_key(path, "ann", KeyLimits())
    file = KeyFile.read(path)
    assert file.refreshed() is file
    secret = api_keys.add_key(path, "berta", KeyLimits(concurrent=4))
    touch(path)
    assert file.refreshed().find(secret) == ApiKey("berta", KeyLimits(concurrent=4))


def test_a_broken_edit_keeps_the_keys_and_is_logged_once(path, caplog):
    secret = api_keys.add_key(path, "ann", KeyLimits())
    file = KeyFile.read(path)
    write(path, "keys: [")
    with caplog.at_level(logging.ERROR):
        file = file.refreshed()
        file = file.refreshed()
    assert file.find(secret)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "stay valid" in caplog.text
    write(path, "keys: {}")
    assert file.refreshed().find(secret) is None


def test_a_deleted_file_keeps_the_keys_until_it_is_back(path):
    secret = api_keys.add_key(path, "ann", KeyLimits())
    file = KeyFile.read(path)
    path.unlink()
    file = file.refreshed()
    assert file.find(secret)
    assert file.refreshed() is file
    write(path, "keys: {}")
    assert file.refreshed().find(secret) is None


def test_files_that_cannot_be_used_say_why(path):
    for text, says in [
        ("keys: [", "invalid YAML: line 1"),
        ("", "Expected `object`, got `null`"),
        ("keys: {ann: {}}", "keys[...]: Object missing required field `sha256`"),
        ("keys: {ann: {sha256: secret}}", "keys[...].sha256"),
        (f"keys: {{ann: {{sha256: '{HASH}', requests: 3}}}}", "unknown field `requests`"),
        (f"keys: {{ann: {{sha256: '{HASH}', concurrent: 0}}}}", "keys[...].concurrent: Expected `int` >= 1"),
        (f"keys: {{ann: {{sha256: '{HASH}', concurrent: many}}}}", "keys[...].concurrent"),
        (f"keys: {{'a b': {{sha256: '{HASH}'}}}}", "'a b' is not a valid key name"),
        (f"keys: {{ann: {{sha256: '{HASH}'}}, bo: {{sha256: '{HASH}'}}}}", "ann and bo have the same secret"),
    ]:
        write(path, text)
        with pytest.raises(KeyFileError) as raised:
            KeyFile.read(path)
        assert says in str(raised.value)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_file_that_others_can_change_is_refused(path):
    api_keys.add_key(path, "ann", KeyLimits())
    path.chmod(0o620)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyFile.read(path)


def test_missing_files_and_folders(path):
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        KeyFile.read(path)
    path.write_text("")
    with pytest.raises(KeyFileError, match="cannot be used for a key file"):
        api_keys.add_key(path / "keys.yaml", "ann", KeyLimits())


def test_keys_added_at_the_same_time_are_all_there(path):
    names = [f"key{number}" for number in range(8)]
    threads = [threading.Thread(target=api_keys.add_key, args=(path, name, KeyLimits())) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in KeyFile.read(path).keys.values()} == set(names)
    assert [file.name for file in path.parent.iterdir()] == ["keys.yaml"]
