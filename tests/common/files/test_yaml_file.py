"""YAML that a stranger wrote."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.common.files.yaml_file import MAX_FILE_BYTES, parse_yaml, read_file
from swarm.errors import UsageError


class Content(msgspec.Struct, forbid_unknown_fields=True):
    number: int = 0
    names: list[str] = []
    shares: dict[str, float] = {}


def parse(text: str) -> Content:
    return parse_yaml(text.encode(), Content, UsageError)


def test_what_is_read():
    assert parse("number: 7\nnames: [a, b]") == Content(7, ["a", "b"])
    assert parse("names: &both [a, b]") == Content(names=["a", "b"])


def test_what_is_refused():
    for text in [
        *('number: !!int ""', 'number: !!float ""', "number: !!bool x", "number: !!timestamp x", "number: !!binary x"),
        *("number: 2001-99-99", "number: " + "9" * 5000, "number: 1:99999999999999999"),
        *("shares: {a: 0x" + "f" * 500 + "}", "shares: {a: !!int [1]}", "? [1]\n: 2", "&a [*a]"),
        *("[" * 10**4, "a: " * 10**4, "\0", "number: \x07", "---\n---", "- &a\n- *b", "!!python/name:os"),
        "%YAML 9.9\n---\nnumber: 1",
    ]:
        with pytest.raises(UsageError):
            parse(text)


def test_merge_keys_that_double_at_each_line():
    lines = ["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60))]
    with pytest.raises(UsageError, match="line 2: merge keys"):
        parse("\n".join(lines))


def test_aliases_that_double_at_each_line():
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)), "names: *a59"]
    with pytest.raises(UsageError, match="unknown field"):
        parse("\n".join(lines))
    with pytest.raises(UsageError, match="names"):
        parse_yaml("\n".join(lines).encode(), NamesOnly, UsageError)


class NamesOnly(msgspec.Struct):
    names: list[str]


PIECES = st.sampled_from(
    [
        *("number", "names", ": ", "\n", "- ", "[", "]", "{", "}", ", ", "1", "a", '"', "'", "&a ", "*a", "? ", "|"),
        *("!!float ", "!!bool ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!pairs ", "!!null ", "!!int "),
        *("0x", "0b", "0o", ":", "_", "-", "+", ".", "e", "~", "\t", "\0", "\x85", "\ufeff", "---\n", "...\n", "#"),
        *("!", ">", "<<: ", "%"),
    ]
)


@given(st.lists(PIECES, max_size=12))
def test_any_text_is_read_or_refused(pieces):
    with suppress(UsageError):
        assert isinstance(parse("".join(pieces)), Content)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data):
    with suppress(UsageError):
        assert isinstance(parse_yaml(data, Content, UsageError), Content)


def test_files(tmp_path):
    path = tmp_path / "file.yaml"

    def read() -> Content:
        return read_file(path, lambda data: parse_yaml(data, Content, UsageError), "test", UsageError)

    with pytest.raises(UsageError, match="cannot be read"):
        read()
    path.write_text("number: x")
    with pytest.raises(UsageError, match=r"file\.yaml: number: "):
        read()
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read()
