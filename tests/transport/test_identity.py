from __future__ import annotations

import os
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import IdentityError
from swarm.transport.identity import load_or_create, peer_id_of


@pytest.fixture(scope="module")
def created(tmp_path_factory):
    return load_or_create(tmp_path_factory.mktemp("identity") / "new" / "folder" / "identity")


def public_key(identity) -> bytes:
    return identity.private_key.get_public_key().to_bytes()


def test_the_file_is_at_no_time_open_to_others(tmp_path, monkeypatch):
    seen = []
    generate = load_or_create.__globals__["P2P"].generate_identity

    def note_rights(path):
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        generate(path)

    monkeypatch.setattr("swarm.transport.identity.P2P.generate_identity", note_rights)
    old = os.umask(0)
    try:
        load_or_create(tmp_path / "identity")
    finally:
        os.umask(old)
    assert seen == [0o600]


def test_it_stays_the_same_when_loaded_again(created):
    before = created.path.read_bytes()
    again = load_or_create(created.path)
    assert again.peer_id == created.peer_id
    assert created.path.read_bytes() == before
    assert again.private_key.to_bytes() == created.private_key.to_bytes()


def test_the_peer_id_follows_from_the_public_key_alone(created):
    assert peer_id_of(public_key(created)) == created.peer_id
    assert created.peer_id == PeerID.from_identity(created.path.read_bytes()).to_base58()
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    with pytest.raises(ValueError, match="not an RSA key"):
        peer_id_of(key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH))


def ed25519_identity() -> bytes:
    key = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=key).SerializeToString()


def test_a_file_that_holds_no_key(created, tmp_path):
    path = tmp_path / "identity"
    for content in (
        b"",
        b"\x08\x00\x12\xff\xff\xff\xff\x0f",
        crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=b"not DER").SerializeToString(),
        ed25519_identity(),
        created.path.read_bytes()[:-40],
    ):
        path.write_bytes(content)
        with pytest.raises(IdentityError, match="does not hold a libp2p RSA key") as caught:
            load_or_create(path)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == content


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot be used"):
        load_or_create(tmp_path / "file" / "identity")


@pytest.mark.parametrize("refuse", ["mkdir", "open"])
def test_an_operating_system_that_refuses(tmp_path, monkeypatch, refuse):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(*((os, "open") if refuse == "open" else ("pathlib.Path.mkdir",)), denied)
    with pytest.raises(IdentityError, match="Permission denied"):
        load_or_create(tmp_path / "folder" / "identity")


@given(st.binary(max_size=100))
@settings(deadline=None)
def test_garbage_names_no_peer(garbage):
    with pytest.raises(ValueError):  # noqa: PT011
        peer_id_of(garbage)
