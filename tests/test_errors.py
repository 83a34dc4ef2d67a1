from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarm import errors


def every(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(found for child in root.__subclasses__() for found in every(child))]


def test_a_remote_error_comes_back_as_the_class_it_was():
    for kind in every(errors.RemoteError):
        raised = errors.remote_error(kind.code, "why")
        assert type(raised) is kind
        assert str(raised) == "why"


def test_no_two_errors_share_a_code():
    codes = [kind.code for kind in every(errors.RemoteError)]
    assert len(set(codes)) == len(codes)


def test_an_unknown_code_is_the_servers_fault():
    for code in ["", "missing_blocks", "WrongShape", "__class__"]:
        assert type(errors.remote_error(code, "why")) is errors.ServerFault


def test_the_tree_says_who_has_to_act():
    for root, kinds in [
        (
            errors.RequestRefused,
            {
                errors.WrongShape,
                errors.WrongDtype,
                errors.NotFinite,
                errors.TooLong,
                errors.UnknownSession,
                errors.WrongPosition,
                errors.WrongSpan,
                errors.UnknownAdapter,
                errors.AdapterRefused,
                errors.ExitRefused,
                errors.TrainingRefused,
                errors.NotAMember,
                errors.UnknownAuthority,
                errors.MembershipExpired,
                errors.MembershipRevoked,
                errors.MembershipNotProven,
                errors.PairingRefused,
                errors.WrongSecret,
                errors.PairedWithAnother,
                errors.RelayRefused,
                errors.WeightsNotShared,
            },
        ),
        (
            errors.ServerFault,
            {
                errors.CacheFull,
                errors.MemoryFull,
                errors.CacheReclaimed,
                errors.DriveFailed,
                errors.TooManyDownloads,
                errors.WeightsNotReady,
                errors.ServerClosing,
            },
        ),
        (errors.PeerLost, {errors.PeerTimeout, errors.DialerBusy}),
        (errors.ProtocolViolation, {errors.NotFiniteOutputs, errors.TooLargeReply}),
    ]:
        assert set(every(root)) == {root, *kinds}


def test_what_goes_wrong_between_peers_is_not_the_persons_fault():
    assert not issubclass(errors.RemoteError, errors.UsageError)
    assert all(issubclass(kind, errors.SwarmError) for kind in every(errors.SwarmError))


def test_missing_blocks_names_them_and_a_command_that_covers_them():
    error = errors.MissingBlocks([4, 5, 7])
    assert error.blocks == (4, 5, 7)
    assert "4:6, 7:8" in str(error)
    assert "--blocks 4:8" in str(error)


def test_what_strangers_wrote_is_one_line_that_commands_nothing():
    said = str(errors.remote_error("remote_error", "no\nERROR all is lost\x1b[2J\u202e — größer"))
    assert said == "no\ufffdERROR all is lost\ufffd[2J\ufffd — größer"


def test_missing_blocks_can_say_why():
    assert "because of rain" in str(errors.MissingBlocks([0], "because of rain"))


def test_format_blocks():
    for blocks, text in [
        ([], ""),
        ([3], "3:4"),
        ([0, 1, 2, 5], "0:3, 5:6"),
        ([5, 2, 1, 0], "0:3, 5:6"),
        ([1, 3], "1:2, 3:4"),
    ]:
        assert errors.format_blocks(blocks) == text


@given(st.sets(st.integers(0, 60), min_size=1))
def test_formatted_ranges_hold_exactly_the_blocks_and_do_not_touch(blocks):
    ranges = [tuple(map(int, part.split(":"))) for part in errors.format_blocks(blocks).split(", ")]
    assert {block for start, end in ranges for block in range(start, end)} == blocks
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(ranges))
