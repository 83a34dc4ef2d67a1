from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarm.errors import MembershipError, MembershipRevoked
from swarm.membership.authority import DAY_S, create_authority, invite_member, read_authority, revoke_member
from swarm.membership.certificates import Revocations, open_revocations, public_bytes
from swarm.membership.membership import Membership

NOW = 1_700_000_000.0


@pytest.fixture
def path(tmp_path):
    create_authority(tmp_path / "members.json")
    return tmp_path / "members.json"


def test_its_file_is_its_owners_alone_and_is_never_replaced(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(MembershipError, match="exists: it may be a swarm's authority"):
        create_authority(path)
    assert path.read_bytes() == before
    invite_member(path, "anna", 30, NOW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["members.json"]


def test_an_invite_is_its_own_members_and_is_not_kept(path):
    invite = invite_member(path, "anna", 30, NOW)
    assert invite.authority == public_bytes(read_authority(path).key)
    assert invite.certificate.expires == NOW + 30 * DAY_S
    assert Membership(invite, now=lambda: NOW).judge(invite.encoded_certificate) == invite.certificate
    assert invite.to_line()[-40:] not in path.read_text()
    assert [(one.name, one.state(NOW)) for one in read_authority(path).invitations] == [("anna", "valid")]


def test_revoking_takes_all_of_a_name_and_nobody_else(path):
    first, second = invite_member(path, "anna", 30, NOW), invite_member(path, "anna", 60, NOW)
    other = invite_member(path, "berta", 30, NOW)
    assert revoke_member(path, "anna", NOW) == 2
    judge = Membership(other, now=lambda: NOW)
    assert judge.learn(read_authority(path).revocation_list(NOW))
    for invite in (first, second):
        with pytest.raises(MembershipRevoked):
            judge.judge(invite.encoded_certificate)
    judge.require_own()
    with pytest.raises(MembershipError, match="no invite of 'anna' is valid"):
        revoke_member(path, "anna", NOW)


def test_each_change_has_a_higher_number(path):
    for name in ("anna", "berta"):
        invite_member(path, name, 30, NOW)
        before = read_authority(path).number
        revoke_member(path, name, NOW)
        assert read_authority(path).number == before + 1


def test_an_older_copy_of_the_file_is_noticed(path):
    """A backup that was restored. Peers would ignore what it publishes, or take back those revoked since."""
    first, _ = [invite_member(path, name, 1, NOW) for name in ("anna", "berta")]
    revoke_member(path, "anna", NOW)
    older = path.read_bytes()

    def published():
        return open_revocations(read_authority(path).revocation_list(NOW), first.authority)

    def require_newest(seen, at=NOW):
        read_authority(path).require_newest(seen, at)

    require_newest(Revocations())
    require_newest(published())
    before = published()
    revoke_member(path, "berta", NOW)
    newer = published()
    require_newest(before)
    require_newest(newer)
    require_newest(newer, NOW + 5 * DAY_S)  # of those that have expired by now too
    path.write_bytes(older)
    require_newest(before)
    for _ in range(3):  # with a lower number than the peers', with the same, and with a higher one
        with pytest.raises(MembershipError, match="an older copy of the authority's file"):
            require_newest(newer)
        invite_member(path, "dora", 1, NOW)
        revoke_member(path, "dora", NOW)


def test_what_expired_leaves_the_list_a_day_later(path):
    invite = invite_member(path, "anna", 1, NOW)
    revoke_member(path, "anna", NOW)
    authority = read_authority(path)

    def listed(at):
        return open_revocations(authority.revocation_list(at), invite.authority).revoked

    assert listed(NOW + 1.9 * DAY_S) == {invite.certificate.serial}
    assert listed(NOW + 2 * DAY_S) == frozenset()


def test_the_authority_itself_joins_for_a_short_time(path):
    invite = read_authority(path).publisher(NOW)
    assert invite.certificate.expires <= NOW + 600
    assert Membership(invite, now=lambda: NOW).judge(invite.encoded_certificate).name == "authority"


def test_two_processes_lose_no_invite(path):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: invite_member(path, f"m{number}", 1, NOW), range(12)))
    assert {one.name for one in read_authority(path).invitations} == {f"m{number}" for number in range(12)}


def test_a_file_that_others_can_read_is_refused(path):
    path.chmod(0o644)
    with pytest.raises(MembershipError, match="chmod 600"):
        read_authority(path)
