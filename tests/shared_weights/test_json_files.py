"""The files of a model that travel: no code, no paths, nothing too large."""

from __future__ import annotations

import json

import pytest

from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights.json_files import MAX_FILE_BYTES, file_problem, offered_files
from tests.shared_weights.peers import make_checkpoint


@pytest.fixture
def folder(tmp_path):
    make_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": "old", "name_or_path": "/home/me"}')
    return tmp_path / "model"


def test_code_is_refused_wherever_it_stands():
    for name in MAX_FILE_BYTES:
        for field in ["auto_map", "custom_pipelines", "custom_generate"]:
            for value in ({field: {}}, {"a": {field: 1}}, {"a": [{"b": [{field: None}]}]}):
                assert field in file_problem(name, json.dumps(value).encode())


def test_no_other_file_travels():
    for name in ["../config.json", "model.py", "chat_template.jinja", "/etc/passwd", ""]:
        assert "no file of this name" in file_problem(name, b"{}")


def test_a_template_in_a_file_of_its_own_is_the_one_that_travels(folder):
    """As where it came from: transformers prefers the file to the field."""
    (folder / "chat_template.jinja").write_text("new")
    found = offered_files(open_checkpoint(folder))
    assert json.loads(found["tokenizer_config.json"]) == {"chat_template": "new"}
    assert "chat_template.jinja" not in found


def test_paths_are_left_out_and_refused(folder):
    assert json.loads(offered_files(open_checkpoint(folder))["tokenizer_config.json"]) == {"chat_template": "old"}
    assert "names a path" in file_problem("tokenizer_config.json", b'{"vocab_file": "/etc/passwd"}')
