from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import MembershipError
from swarm.membership.invite import INVITE_PREFIX, parse_invite, read_invite
from tests.members import TestAuthority

INVITE = TestAuthority().invite("anna")
LINE = INVITE.to_line()


def test_a_line_is_one_word_and_comes_back():
    assert parse_invite(LINE) == INVITE
    assert LINE.startswith(INVITE_PREFIX)
    assert LINE.isascii()
    assert len(LINE.split()) == 1
    assert len(LINE) < 500


def test_it_is_read_as_a_line_or_from_a_file(tmp_path):
    path = tmp_path / "anna.invite"
    path.write_text(f"{LINE}\n")
    assert read_invite(LINE) == read_invite(f" {LINE}\n") == read_invite(path) == read_invite(str(path)) == INVITE


@given(cut=st.integers(len(INVITE_PREFIX), len(LINE) - 1))
def test_a_line_that_was_not_copied_whole_is_said_to_be_damaged(cut):
    with pytest.raises(MembershipError, match="is damaged: copy the whole line"):
        read_invite(LINE[:cut])


@given(position=st.integers(len(INVITE_PREFIX), len(LINE) - 1), letter=st.sampled_from("AZaz09-_+/=. \u00e4"))
def test_a_changed_character_never_gives_another_invite(position, letter):
    changed = LINE[:position] + letter + LINE[position + 1 :]
    try:
        found = parse_invite(changed)
    except MembershipError:
        return
    assert found == INVITE  # the last character has bits that mean nothing


def test_a_key_of_somebody_else_does_not_fit():
    mixed = replace(INVITE, private_key=TestAuthority().invite().private_key)
    with pytest.raises(MembershipError, match="belongs to another certificate"):
        parse_invite(mixed.to_line())


def test_part_of_an_invite_is_not_repeated():
    with pytest.raises(MembershipError) as found:
        read_invite(LINE[40:])
    assert LINE[-43:] not in str(found.value)
    assert LINE[60:80] not in str(found.value)
