"""Position ids of the caller: they count as in transformers, or they are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from swarm.errors import UsageError
from tests import zoo
from tests.swarms import run_client, run_swarm

TEXTS = [[5, 9, 23, 42, 7], [61, 17, 33], [12, 88, 3, 40, 41, 42]]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    folder = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("positions") / "model")
    with run_swarm(folder, ["0:3", "3:6"]) as running:
        yield running


def local_model(swarm):
    return AutoModelForCausalLM.from_pretrained(swarm.model, dtype=torch.float32)


def test_ids_that_do_not_count_on_separate_texts_as_in_transformers(swarm):
    tokens = torch.tensor([TEXTS[0] + TEXTS[1], TEXTS[2] + TEXTS[0][:2]])
    local = local_model(swarm)
    with run_client(swarm) as model, torch.no_grad():
        for row in (
            [0, 1, 2, 3, 4, 0, 1, 2],
            [0, 1, 2, 7, 8, 9, 10, 11],
            [0, 0, 1, 1, 2, 2, 3, 3],
            [*range(7, -1, -1)],
        ):
            for ids in (torch.tensor([row]), torch.tensor([row, [*range(3, 11)]])):
                given = {"input_ids": tokens[: len(ids)], "position_ids": ids}
                wanted = local(**given, use_cache=False).logits
                torch.testing.assert_close(model(**given).logits, wanted, atol=2e-4, rtol=1e-4)
                with pytest.raises(UsageError, match="position_ids of row 0"):
                    model(**given, attention_mask=torch.ones_like(given["input_ids"]))
                with pytest.raises(UsageError, match="position_ids of row 0"):
                    model(**given, use_cache=True)
        with pytest.raises(UsageError, match="position_ids of row 0"):
            model(tokens, position_ids=torch.arange(-1, 7).unsqueeze(0))


def test_packed_texts_train_as_with_transformers(swarm, tmp_path):
    def losses(model):
        arguments = TrainingArguments(
            tmp_path, per_device_train_batch_size=3, max_steps=2, logging_steps=1, report_to=[], use_cpu=True,
            learning_rate=0.0, remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model,
            arguments,
            data_collator=DataCollatorWithFlattening(),
            train_dataset=[{"input_ids": text, "labels": text} for text in TEXTS],
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with run_client(swarm, tuning_mode="lora", lora_rank=2) as model:
        assert losses(model) == pytest.approx(losses(local_model(swarm)), abs=1e-3)

    with (
        run_client(swarm, tuning_mode="ptune", pre_seq_len=2) as model,
        pytest.raises(UsageError, match="virtual tokens"),
    ):
        losses(model)
