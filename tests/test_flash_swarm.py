"""Real servers whose weights are on flash: exact ones say the local model's text, and sparse ones are marked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.errors import MissingBlocks
from swarm.models.flash.files.block_files import FOLDER_NAME, LOCKS_FOLDER, packed_files
from swarm.server.flash_budget import FlashOption
from tests import zoo
from tests.swarms import run_client, run_swarm

LENGTH = 12
PERIOD_S = 1.0


def local_texts(folder: Path) -> list[list[int]]:
    return zoo.greedy_texts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LENGTH)


@pytest.fixture
def checkpoint(request, tmp_path) -> Path:
    return zoo.make_checkpoint(request.param, tmp_path / request.param)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["mixtral", "llama"], indirect=True)
def test_one_server_on_flash_says_what_the_local_model_says(checkpoint, tmp_path):
    options = {"flash": FlashOption(memory=200_000), "cache_dir": tmp_path / "cache"}
    with run_swarm(checkpoint, ["0:6"], **options) as swarm, run_client(swarm) as model:
        (server,) = model.swarm.servers()
        assert not server.sparse
        assert zoo.greedy_texts(model, LENGTH) == local_texts(checkpoint)
    assert len(list((tmp_path / "cache" / "swarm-flash").rglob("*.records"))) == zoo.BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["mixtral"], indirect=True)
def test_a_server_on_flash_moves_to_other_blocks(checkpoint, tmp_path):
    """It closes a gap with blocks that it prepares there, and goes on with the text of a session that it served."""
    cache = tmp_path / "cache"
    flash = {"flash": FlashOption(memory=100_000), "cache_dir": cache}
    # So slow that a route goes through the one on flash, whatever a busy machine makes of their round trips.
    with run_swarm(checkpoint, ["0:4"], update_period=PERIOD_S, throughput=1.0) as swarm:
        tail = swarm.start("4:6", update_period=PERIOD_S).wait_ready()
        quick = 1e6
        moving = swarm.start("3", update_period=PERIOD_S, stay=False, throughput=quick, **flash).wait_ready()
        home = blocks_on_flash(cache)
        assert len(home) == 3
        with run_client(swarm) as model:
            expected = local_texts(checkpoint)[0]
            prompt = torch.tensor([zoo.PROMPTS[0]])
            with model.inference_session(max_length=64) as session:
                begun = model.generate(prompt, max_new_tokens=5, do_sample=False, session=session)
                assert moving.peer_id in [hop.server.peer_id for hop in session.route.hops]
                tail.kill()
                ended = model.generate(begun, max_new_tokens=LENGTH - 5, do_sample=False, session=session)
                after = {hop.server.peer_id: hop.span for hop in session.route.hops}
            assert after[moving.peer_id].end == zoo.BLOCKS
            assert ended[0, prompt.shape[1] :].tolist() == expected
            assert zoo.greedy_texts(model, LENGTH) == local_texts(checkpoint)
        assert moving.works
    assert blocks_on_flash(cache) == home | {3, 4, 5}
    assert home != {3, 4, 5}


def blocks_on_flash(cache: Path) -> set[int]:
    """The blocks of the only model that was prepared."""
    (folder,) = [path for path in (cache / FOLDER_NAME).iterdir() if path.name != LOCKS_FOLDER]
    return {file.block for file in packed_files(folder) if file.part == "json" and file.finished}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["opt"], indirect=True)
def test_a_server_that_selects_neurons_is_used_only_by_clients_that_accept_it(checkpoint, tmp_path):
    zoo.save_tokenizer(checkpoint)
    options = {"flash": FlashOption(memory=4_000_000), "cache_dir": tmp_path / "cache"}
    with run_swarm(checkpoint, ["0:6"], **options) as swarm:
        with run_client(swarm, wait_for_blocks=1.0) as model, pytest.raises(MissingBlocks, match="exact=False"):
            zoo.greedy_texts(model, 1)
        with run_client(swarm, exact=False) as model:
            (server,) = model.swarm.servers()
            assert server.sparse
            assert abs(server.perplexity_loss) < 0.2
            texts = zoo.greedy_texts(model, LENGTH)
        assert [len(text) for text in texts] == [LENGTH, LENGTH]
        same = [
            mine == right
            for text, local in zip(texts, local_texts(checkpoint), strict=True)
            for mine, right in zip(text, local, strict=True)
        ]
        assert sum(same) >= len(same) // 4  # by chance it would be one of a hundred


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["mixtral"], indirect=True)
def test_a_drive_that_fails_in_mid_text_is_left_for_another_server(checkpoint, tmp_path):
    """The server answers with its error, and works again when the drive does."""
    cache = tmp_path / "cache"
    flash = {"flash": FlashOption(memory=100_000), "cache_dir": cache}
    with run_swarm(checkpoint, ["0:3"]) as swarm:
        failing = swarm.start("3:6", throughput=1e6, **flash).wait_ready()
        with run_client(swarm) as model, model.inference_session(max_length=64) as session:
            prompt = torch.tensor([zoo.PROMPTS[0]])
            begun = model.generate(prompt, max_new_tokens=5, do_sample=False, session=session)
            swarm.start("3:6").wait_ready()
            for path in cache.rglob("*.records"):
                os.truncate(path, 0)
            ended = model.generate(begun, max_new_tokens=LENGTH - 5, do_sample=False, session=session)
            assert ended[0, prompt.shape[1] :].tolist() == local_texts(checkpoint)[0]
            used = [hop.server.peer_id for hop in session.route.hops]
        assert failing.peer_id not in used
        assert failing.works
