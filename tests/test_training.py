"""Gradients through a swarm of real server processes, against torch's own on the plain transformers model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swarm.data_structures import Span
from swarm.errors import AdapterRefused, SwarmError
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from tests.slow import slow_except
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.tuned import ListedAdapter, adapted, random_adapter
from tests.zoo import PROMPTS, VOCABULARY, config_of, make_checkpoint

FAMILIES = ("llama", "qwen3", "gemma3_text", "opt", "bloom", "mixtral", "gpt2")
SPANS = ("0:2", "2:3", "3:6")
EXACT = 1e-4


def plain(folder: Path) -> Any:
    """The frozen transformers model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)


def batch(rows: int = 4, tokens: int = 9, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and a mask of rows of different lengths."""
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, rows, 2):
        mask[row, tokens - row :] = 0
    return ids, mask


def embedded(local: Any, ids: torch.Tensor) -> torch.Tensor:
    return local.get_input_embeddings()(ids).detach().requires_grad_()


def loss_of(model: Any, hidden: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(inputs_embeds=hidden, attention_mask=mask).logits
    real = mask[:, 1:].bool()
    return nn.functional.cross_entropy(logits[:, :-1][real].float(), ids[:, 1:][real])


def local_gradients(
    local: Any, adapter: ListedAdapter, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of the inputs and of the adapter's tensors."""
    hidden = embedded(local, ids)
    with adapted(local, adapter):
        return torch.autograd.grad(loss_of(local, hidden, ids, mask), [hidden, *adapter.tensors])


def assert_equal(found: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor], most: float = EXACT) -> None:
    """Each gradient differs by at most so much of its own size, and none of them is nothing."""
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert one is not None
        assert float(other.norm()) > 0
        assert float((one - other).norm() / other.norm()) <= most


@pytest.mark.parametrize("family", slow_except(FAMILIES, "llama", "gpt2"))
def test_gradients_equal_local_ones(family: str, tmp_path: Path) -> None:
    """Also when the server in the middle is killed between the passes, and another one comes for it."""
    folder = make_checkpoint(family, tmp_path)
    local, (ids, mask) = plain(folder), batch()
    adapter = random_adapter(local)
    right = local_gradients(local, adapter, ids, mask)
    with run_swarm(folder, SPANS) as swarm, run_client(swarm) as model:
        model.remote_blocks.adapter = adapter
        hidden = embedded(local, ids)
        loss = loss_of(model, hidden, ids, mask)
        assert_equal(torch.autograd.grad(loss, [hidden, *adapter.tensors], retain_graph=True), right)
        replace(swarm, "2:3")
        assert_equal(torch.autograd.grad(loss, [hidden, *adapter.tensors]), right)


def replace(swarm: TestSwarm, blocks: str) -> None:
    """Kill the server of some blocks; another one has come shortly before."""
    (server,) = swarm.holders(blocks)
    swarm.start(blocks).wait_ready()
    server.kill()
    swarm.servers.remove(server)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    return plain(folder)


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Each span twice."""
    with run_swarm(folder, ("0:3", "3:6", "0:3", "3:6")) as servers:
        yield servers


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm) as client:
        client.requires_grad_(False)
        yield client


@pytest.fixture(autouse=True)
def _no_adapter(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").remote_blocks.adapter = None


def remote_gradients(
    model: Any, local: Any, adapter: ListedAdapter, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    model.remote_blocks.adapter = adapter
    hidden = embedded(local, ids)
    return torch.autograd.grad(loss_of(model, hidden, ids, mask), [hidden, *adapter.tensors])


@pytest.mark.slow
def test_a_batch_goes_several_ways_and_its_gradient_is_the_same(model: Any, local: Any) -> None:
    ids, mask = batch(rows=16, tokens=60)
    counts = mask.sum(1).tolist()
    assert len(model.swarm.split_batch(Span(0, 6), counts)) == 2
    adapter = random_adapter(local)
    found = remote_gradients(model, local, adapter, ids, mask)
    assert_equal(found, local_gradients(local, adapter, ids, mask))


def test_only_what_wants_gradients_gets_them(model: Any, local: Any) -> None:
    """Some blocks have parts, some of these tensors are trained, one of them is a result of others."""
    ids, mask = batch()
    adapter = random_adapter(local, blocks=(1, 4), prompt=0)
    first = adapter.parts[4].factors[0]
    scale = torch.tensor(0.5, requires_grad=True)
    adapter.parts[4] = BlockAdapterWeights(None, (LoraFactors(first.module, first.down.detach(), first.up * scale),))
    adapter.parts[1].factors[0].down.requires_grad_(False)
    wanted = [scale, first.up]
    hidden = embedded(local, ids).detach()
    with adapted(local, adapter):
        right = torch.autograd.grad(loss_of(local, hidden, ids, mask), wanted, retain_graph=True)
    model.remote_blocks.adapter = adapter
    loss_of(model, hidden, ids, mask).backward()
    assert_equal([tensor.grad for tensor in wanted], right)
    assert first.down.grad is None
    assert adapter.parts[1].factors[0].down.grad is None


def test_modules_between_blocks_are_trained(model: Any, local: Any) -> None:
    """`remote_blocks[:a]`, a module of the client's, `remote_blocks[a:]`; and what comes between is there to see."""
    ids, _ = batch()
    adapter = random_adapter(local)
    torch.manual_seed(0)
    middle = nn.Linear(32, 32)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        changed = hidden + middle(hidden)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = local.model.layers[3].register_forward_hook(hook)
    hidden = embedded(local, ids)
    wanted = [hidden, *middle.parameters(), *adapter.tensors]
    with adapted(local, adapter):
        right = torch.autograd.grad(local(inputs_embeds=hidden).logits.square().mean(), wanted)
    handle.remove()
    model.remote_blocks.adapter = adapter
    before = model.remote_blocks[:4](hidden)
    assert before.requires_grad
    after = model.remote_blocks[4:](before + middle(before))
    found = torch.autograd.grad(model.lm_head(model.model.norm(after)).square().mean(), wanted)
    assert_equal(found, right)


def test_clients_train_different_adapters_on_the_same_servers(swarm: TestSwarm, local: Any) -> None:
    """At the same time, several steps each; each gets what it would get alone."""
    jobs = [(random_adapter(local, rank=rank, seed=rank), batch(seed=rank)) for rank in (1, 2, 3)]
    right = [local_gradients(local, adapter, *data) for adapter, data in jobs]
    begin = threading.Barrier(len(jobs))

    def train(adapter: ListedAdapter, data: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        with run_client(swarm) as client:
            begin.wait(60)
            return [remote_gradients(client, local, adapter, *data) for _ in range(5)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: train(*job), jobs))
    for rounds, expected in zip(found, right, strict=True):
        for gradients in rounds:
            assert_equal(gradients, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_at_the_client(model: Any, local: Any, dtype: torch.dtype) -> None:
    """Hidden states and gradients of 16 bits here; servers compute in 32."""
    ids, _ = batch()
    adapter = random_adapter(local)
    exact, hidden = embedded(local, ids), embedded(local, ids)
    model.remote_blocks.adapter = adapter
    right = torch.autograd.grad(model.remote_blocks(exact).square().mean(), [exact, *adapter.tensors])
    output = model.remote_blocks(hidden.to(dtype))
    assert output.dtype is dtype
    found = torch.autograd.grad(output.float().square().mean(), [hidden, *adapter.tensors])
    assert_equal(found, right, 0.15)


def test_gradients_of_gradients_are_refused(model: Any, local: Any) -> None:
    hidden = embedded(local, batch()[0])
    loss = model.remote_blocks(hidden).square().mean()
    with pytest.raises(SwarmError, match="leave create_graph=True out"):
        torch.autograd.grad(loss, [hidden], create_graph=True)
    torch.autograd.grad(loss, [hidden])


def test_rows_of_padding_alone_have_no_gradient(model: Any, local: Any) -> None:
    ids, mask = batch()
    mask[2] = 0
    hidden = embedded(local, ids)
    output = model.remote_blocks(hidden, mask)
    assert not output[2].any()
    (gradient,) = torch.autograd.grad(output.square().sum(), [hidden])
    assert not gradient[~mask.bool()].any()
    assert gradient[mask.bool()].any()
    nothing = model.remote_blocks(hidden, torch.zeros_like(mask))
    (gradient,) = torch.autograd.grad(nothing.sum(), [hidden])
    assert not gradient.any()


def test_an_adapter_that_does_not_fit_is_said_at_once_and_harms_nobody(model: Any, local: Any) -> None:
    ids, mask = batch()
    misfit = LoraFactors("self_attn.z_proj", torch.zeros(2, 32), torch.zeros(32, 2))
    model.remote_blocks.adapter = ListedAdapter({4: BlockAdapterWeights(None, (misfit,))})
    with pytest.raises(AdapterRefused, match=r"block 4 has no linear module 'self_attn.z_proj'"):
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(AdapterRefused, match=r"self_attn.z_proj"):
        model.generate(ids, max_new_tokens=1)
    adapter = random_adapter(local)
    assert_equal(remote_gradients(model, local, adapter, ids, mask), local_gradients(local, adapter, ids, mask))


def test_blocks_of_the_clients_own(swarm: TestSwarm, local: Any) -> None:
    """The first two blocks here, the others there: the same gradients, and the same texts in a session."""
    ids, mask = batch()
    adapter = random_adapter(local)
    right = local_gradients(local, adapter, ids, mask)
    prompt = torch.tensor([PROMPTS[1]])
    with run_client(swarm, local_blocks=2) as client:
        assert_equal(remote_gradients(client, local, adapter, ids, mask), right)
        hidden = embedded(local, ids)
        (found,) = torch.autograd.grad(client.remote_blocks[:2](hidden).square().mean(), [hidden])
        assert found.any()
        assert client.generate(prompt, max_new_tokens=8, do_sample=False).tolist() == texts(local, adapter, prompt, 8)


def texts(local: Any, adapter: ListedAdapter, prompt: torch.Tensor, tokens: int) -> list[list[int]]:
    with torch.no_grad(), adapted(local, adapter):
        return local.generate(prompt, max_new_tokens=tokens, do_sample=False, use_cache=False).tolist()


@pytest.mark.slow
def test_a_session_keeps_its_adapter_when_servers_are_killed(folder: Path, local: Any) -> None:
    """And when the client goes on training meanwhile."""
    adapter = random_adapter(local, prompt=3)
    prompt = torch.tensor([PROMPTS[0]])
    right = texts(local, adapter, prompt, 16)
    assert right != texts(local, ListedAdapter({}), prompt, 16)
    with run_swarm(folder, SPANS) as swarm, run_client(swarm) as model:
        model.remote_blocks.adapter = adapter
        with model.inference_session(max_length=32) as session:
            written = model.generate(prompt, max_new_tokens=4, do_sample=False)
            with torch.no_grad():
                for tensor in adapter.tensors:
                    tensor.add_(1.0)
            for number, blocks in enumerate(("2:3", "0:2", "3:6"), start=2):
                replace(swarm, blocks)
                written = model.generate(written, max_new_tokens=4, do_sample=False)
                assert session.position == len(PROMPTS[0]) + 4 * number - 1
            assert written.tolist() == right
        assert model.generate(prompt, max_new_tokens=16, do_sample=False).tolist() == texts(local, adapter, prompt, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "wire", "most"), [("llama", "float16", 5e-3), ("gpt2", "bfloat16", 2e-2), ("mixtral", "float16", 5e-3)]
)
def test_16_bits_on_the_wire(family: str, wire: str, most: float, tmp_path: Path) -> None:
    """Models as they are initialized by transformers: those of the zoo multiply every error. bfloat16 has three bits
    less than float16."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).save_pretrained(tmp_path)
    local, (ids, mask) = plain(tmp_path), batch()
    adapter = random_adapter(local)
    right = local_gradients(local, adapter, ids, mask)
    with run_swarm(tmp_path, SPANS) as swarm, run_client(swarm, wire=wire) as model:
        found = remote_gradients(model, local, adapter, ids, mask)
    together = [torch.cat([one.flatten() for one in gradients]) for gradients in (found, right)]
    assert_equal(together[:1], together[1:], most)
    assert_equal(found, right, 2 * most)  # the smallest tensors are a little worse
