from __future__ import annotations

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


def test_missing_blocks_names_them_and_a_command_that_covers_them():
    error = errors.MissingBlocks([4, 5, 7])
    assert error.blocks == (4, 5, 7)
    assert "4:6, 7:8" in str(error)
    assert "--blocks 4:8" in str(error)


def test_what_strangers_wrote_is_one_line_that_commands_nothing():
    said = str(errors.remote_error("remote_error", "no\nERROR all is lost\x1b[2J\u202e — größer"))
    assert said == "no\ufffdERROR all is lost\ufffd[2J\ufffd — größer"


def test_format_blocks():
    for blocks, text in [
        ([], ""),
        ([3], "3:4"),
        ([0, 1, 2, 5], "0:3, 5:6"),
        ([5, 2, 1, 0], "0:3, 5:6"),
        ([1, 3], "1:2, 3:4"),
    ]:
        assert errors.format_blocks(blocks) == text
