"""Real servers whose weights are on flash: exact ones say the local model's text, and sparse ones are marked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.models.flash.reading.record_reader import FlashIo
from swarm.server.flash_budget import FlashOption
from tests import zoo
from tests.swarms import run_client, run_swarm

LENGTH = 12


def local_texts(folder: Path) -> list[list[int]]:
    return zoo.greedy_texts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LENGTH)


@pytest.fixture
def checkpoint(request, tmp_path) -> Path:
    return zoo.make_checkpoint(request.param, tmp_path / request.param)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["mixtral", "llama"], indirect=True)
def test_one_server_on_flash_says_what_the_local_model_says(checkpoint, tmp_path):
    options = {"flash": FlashOption(memory=200_000), "flash_io": FlashIo.CACHED, "cache_dir": tmp_path / "cache"}
    with run_swarm(checkpoint, ["0:6"], **options) as swarm, run_client(swarm) as model:
        (server,) = model.swarm.servers()
        assert not server.sparse
        assert zoo.greedy_texts(model, LENGTH) == local_texts(checkpoint)
    assert len(list((tmp_path / "cache" / "swarm-flash").rglob("*.records"))) == zoo.BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["mixtral"], indirect=True)
def test_the_server_in_the_middle_is_killed_and_replaced_in_mid_text(checkpoint, tmp_path):
    flash = {"flash": FlashOption(memory=100_000), "flash_io": FlashIo.CACHED, "cache_dir": tmp_path / "cache"}
    with run_swarm(checkpoint, ["0:2", "4:6"]) as swarm:
        first = swarm.start("2:4", **flash).wait_ready()
        with run_client(swarm) as model:
            expected = local_texts(checkpoint)[0]
            prompt = torch.tensor([zoo.PROMPTS[0]])
            with model.inference_session(max_length=64) as session:
                begun = model.generate(prompt, max_new_tokens=5, do_sample=False, session=session)
                swarm.start("2:4", **flash).wait_ready()
                first.kill()
                ended = model.generate(begun, max_new_tokens=LENGTH - 5, do_sample=False, session=session)
            assert ended[0, prompt.shape[1] :].tolist() == expected
