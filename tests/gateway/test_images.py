"""Images of a conversation, from OpenAI's client to a gateway of real servers: answers are those of transformers."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from swarm.errors import ImageRefused
from swarm.models.tokenizers.image_prompt import MAX_PIXELS, _decoded
from swarm.models.tokenizers.prompt_process import PromptProcess
from tests import wrappers
from tests.gateways import GatewayProcess, run_gateway
from tests.swarms import run_swarm

NEW = 12
BEFORE = [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", ":", *(f"w{number}" for number in range(121)), "<image>"]


def save_llava(folder: Path) -> Path:
    """A tiny llava, with the processor and the chat template that it needs."""
    wrappers.save(wrappers.make_wrapper("llava"), folder)
    vocabulary = {word: wrappers.IMAGE if word == "<image>" else number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", additional_special_tokens=["<image>"]
    )
    pixels = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def noise(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(values.to(torch.uint8).numpy())


def data_url(image: Image.Image, kind: str = "png", **options: Any) -> str:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(written.getvalue()).decode()}"


def bomb(width: int, height: int) -> str:
    """A PNG of a few bytes that says that it is this large."""
    begin, _, body = data_url(noise(0, 1, 1)).partition(",")
    file = bytearray(base64.b64decode(body))
    file[16:24] = struct.pack(">II", width, height)
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    return f"{begin},{base64.b64encode(file).decode()}"


def asked(*urls: str) -> list[dict[str, Any]]:
    """A text, with the images in its middle, behind a turn without one."""
    shown = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    parts = [{"type": "text", "text": "w3 w4"}, *shown, {"type": "text", "text": "w5"}]
    return [*BEFORE, {"role": "user", "content": parts}]


@dataclass
class Served:
    gateway: GatewayProcess
    client: openai.OpenAI
    folder: Path

    def ask(self, messages: Any, **more: Any) -> Any:
        name = self.client.models.list().data[0].id
        more = {"temperature": 0, "max_tokens": NEW, **more}
        return self.client.chat.completions.create(model=name, messages=messages, **more)

    def refusal(self, messages: Any, **more: Any) -> tuple[str, str | None, str | None]:
        with pytest.raises(openai.BadRequestError) as refused:
            self.ask(messages, **more)
        return refused.value.message, refused.value.param, refused.value.code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_llava(tmp_path_factory.mktemp("llava"))
    with (
        run_swarm(folder, ("0:3", "3:6"), dtype="float32") as swarm,
        run_gateway(swarm, dtype="float32") as gateway,
        openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield Served(gateway, client, folder)


def local_text(folder: Path, *images: Image.Image) -> tuple[int, str]:
    """The prompt's length, and what transformers' own load of the same files answers."""
    processor = AutoProcessor.from_pretrained(folder)
    talk = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in BEFORE]
    shown = [{"type": "image", "image": one} for one in images]
    talk.append(
        {"role": "user", "content": [{"type": "text", "text": "w3 w4"}, *shown, {"type": "text", "text": "w5"}]}
    )
    inputs = processor.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    local = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    text = local.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0]
    length = inputs["input_ids"].shape[1]
    prompt, whole = (processor.tokenizer.decode(one, skip_special_tokens=True) for one in (text[:length], text))
    return length, whole.removeprefix(prompt)


def test_answers_about_images_are_those_of_transformers(served):
    first, second, third = (noise(seed) for seed in range(3))
    length, text = local_text(served.folder, first, second)
    assert len(set(text.split())) >= 4, "text that does not vary proves nothing"
    talk = asked(data_url(first), data_url(second))
    reply = served.ask(talk, n=2)
    assert [choice.message.content for choice in reply.choices] == [text, text]
    assert reply.usage.prompt_tokens == length
    chunks = list(served.ask(talk, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert served.ask(asked(data_url(first), data_url(third))).choices[0].message.content != text
    tokens = httpx.post(f"{served.gateway.url}/tokenize", json={"messages": talk}, timeout=60).json()
    assert (tokens["count"], tokens["tokens"].count(wrappers.IMAGE)) == (length, 8)
    # As phones write them: large, and turned by a tag.
    large = noise(4, 2400, 1600)
    large.getexif()[0x0112] = 6
    turned = data_url(large, "jpeg", quality=90, exif=large.getexif())
    assert len(turned) > 3 * 2**20
    (choice,) = served.ask(asked(turned)).choices
    opened = Image.open(io.BytesIO(base64.b64decode(turned.partition(",")[2])))
    assert choice.message.content == local_text(served.folder, opened.transpose(Image.Transpose.ROTATE_270))[1]


def test_what_is_refused(served, gateway):
    good = data_url(noise(0))
    broken = good[:200] + "A" * 40 + good[240:]
    for url, words in [
        ("https://example.com/cat.png", "image 2 cannot be used: nothing is fetched; send data:image/png;base64,"),
        (data_url(noise(0), "bmp"), "nothing is fetched; send data:image/png;base64,"),
        (good.replace("base64,", "base64,-"), "image 2 cannot be used: "),
        (good[:300] + "AAAA", "image 2 cannot be used: "),
        (broken, "image 2 cannot be used: "),
        (data_url(noise(0), "bmp").replace("bmp", "png"), "image 2 cannot be used: it is no PNG, JPEG"),
        (bomb(60_000, 60_000), "with its 60000 x 60000 pixels there are more than 16 images or 67108864 pixels"),
    ]:
        message, param, code = served.refusal(asked(good, url))
        assert words in message
        assert (param, code) == ("messages", "invalid_image")
    assert "more than 16 images" in served.refusal(asked(*[good] * 17))[0]
    assert served.refusal(asked(good), extra_body={"truncate_prompt_tokens": 9})[1] == "truncate_prompt_tokens"
    unknown = asked(good)
    unknown[-1]["content"][1]["image_url"]["detail"] = "huge"
    assert "detail" in served.refusal(unknown)[1]
    # The word for an image, without one: the processor finds that they do not go together.
    extra = [*asked(good), {"role": "user", "content": "<image>"}]
    assert served.refusal(extra)[2] == "invalid_image"
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
        message, param, code = Served(gateway, client, served.folder).refusal(asked(good))
        assert "a model of the family 'llama' takes no images; leave them out" in message
        assert (param, code) == ("messages", "images_not_supported")
    assert served.ask(asked(good)).choices[0].message.content == local_text(served.folder, noise(0))[1]


def test_a_text_without_an_image_is_written_as_the_template_wants_it(served):
    """The template writes lists of parts, and of a plain text nothing."""
    local = AutoProcessor.from_pretrained(served.folder).tokenizer
    asked = {"messages": [{"role": "user", "content": "w20 w21"}]}
    tokens = httpx.post(f"{served.gateway.url}/tokenize", json=asked, timeout=60).json()["tokens"]
    assert local.decode(tokens) == "user : w20 w21 assistant :"


def test_the_process_for_images_ends_with_the_one_for_texts(served):
    before = psutil.Process().children()
    with closing(PromptProcess(str(served.folder))) as process:
        url = data_url(noise(0))
        tokens, tensors = process.conversation_with_images(
            [{"role": "user", "content": [{"type": "image", "url": url}]}], None, None
        )
        assert tokens.count(wrappers.IMAGE) == 4
        pixels = AutoProcessor.from_pretrained(served.folder).image_processor(noise(0), return_tensors="pt")
        assert torch.equal(tensors["pixel_values"], pixels["pixel_values"])
        both = [one for one in psutil.Process().children() if one not in before]
        assert len(both) == 2
    assert not any(one.is_running() for one in both)


FILES = [data_url(noise(1), kind) for kind in ("png", "jpeg", "webp", "gif")]


@given(st.sampled_from(FILES), st.data())
def test_any_bytes_are_an_image_or_refused(url, data):
    begin, _, body = url.partition(",")
    file = bytearray(base64.b64decode(body))
    for place in data.draw(st.lists(st.integers(0, len(file) - 1), max_size=6)):
        file[place] = data.draw(st.integers(0, 255))
    body = base64.b64encode(file[: data.draw(st.integers(0, len(file)))]).decode()
    text = data.draw(
        st.one_of(st.just(f"{begin},{body}"), st.text(max_size=40), st.text(max_size=40).map(begin.__add__))
    )
    try:
        (image,) = _decoded(iter([text]))
    except ImageRefused:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= MAX_PIXELS
