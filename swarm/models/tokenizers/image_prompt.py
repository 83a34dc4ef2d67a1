"""From a conversation with images to what the model's own processor makes of it, in a process that can be ended."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

from swarm.errors import CheckpointError, ImageRefused
from swarm.models.tokenizers.chat_template import ChatMessage, TemplateOptions, conversation_text

MAX_IMAGES = 16
MAX_PIXELS = 1 << 26
"""Of all images: five of a phone, or its largest. Decoded they take 256 MB, and processors make copies."""

MAX_ARRAY_BYTES = 1 << 27
"""Of what a processor makes of all images. One in the largest size that processors know takes 30 MB."""

NO_PACKAGE = "images need the package {0}, which this gateway lacks; its operator gets it with: pip install {0}"
_DATA_URL = re.compile("data:image/(?:png|jpe?g|webp|gif);base64,", re.IGNORECASE)


def image_urls(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """The data URLs of the images, in their order. A message with images has parts, any other a text."""
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from (part["url"] for part in message["content"] if part["type"] == "image")


def load_processor(source: str, revision: str, cache_dir: str) -> Any:
    """The model's processor. Raises `CheckpointError` if there is none that can be used here."""
    import torch
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        return AutoProcessor.from_pretrained(source, cache_dir=cache_dir or None, trust_remote_code=False, **options)
    except Exception as error:  # foreign input; each family's processor raises its own errors
        if "torchvision" in str(error).lower():
            raise CheckpointError(NO_PACKAGE.format("torchvision")) from error
        raise CheckpointError(f"{source} has no usable processor for images: {error}") from error


def image_tokens(
    processor: Any, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, options: TemplateOptions
) -> tuple[list[int], bytes]:
    """Token ids of a conversation, and as safetensors what the processor makes of its images.

    Raises:
        ImageRefused: an image cannot be read, or the processor does not take the images.
        ChatTemplateError: see `chat_template.conversation_tokens`.
    """
    import safetensors.torch
    import torch

    images = _decoded(image_urls(messages))
    writer = processor if getattr(processor, "chat_template", None) else processor.tokenizer
    text = conversation_text(writer, messages, tools, options)
    begin = str(processor.tokenizer.bos_token or "")  # as the processor's own `apply_chat_template` does
    special = {"add_special_tokens": False} if begin and text.startswith(begin) else {}
    try:
        made = processor(text=text, images=[images], return_tensors="pt", **special)
        arrays = {name: torch.as_tensor(one).contiguous() for name, one in made.items() if name != "attention_mask"}
        tokens: list[int] = arrays.pop("input_ids")[0].tolist()
        packed = safetensors.torch.save(arrays)
    except Exception as error:  # each family's processor raises its own errors
        why = str(error) or type(error).__name__
        raise ImageRefused(f"the model's processor does not take these images in this conversation: {why}") from error
    if len(packed) > MAX_ARRAY_BYTES:
        raise ImageRefused(f"the images become {len(packed) >> 20} MiB of pixels; send fewer or smaller ones")
    return tokens, packed


def _decoded(urls: Iterator[str]) -> list[Any]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # pixels are counted here
    images, room = [], MAX_PIXELS
    for number, url in enumerate(urls, 1):
        try:
            if (begin := _DATA_URL.match(url)) is None:
                raise ValueError("nothing is fetched; send data:image/png;base64, (or jpeg, webp, gif) and its bytes")
            file = io.BytesIO(base64.b64decode(url[begin.end() :], validate=True))
            opened = Image.open(file, formats=("PNG", "JPEG", "WEBP", "GIF"))
            room -= opened.width * opened.height
            if room < 0 or number > MAX_IMAGES:
                raise ValueError(
                    f"with its {opened.width} x {opened.height} pixels there are more than {MAX_IMAGES} images or "
                    f"{MAX_PIXELS} pixels; send fewer or smaller ones"
                )
            images.append(ImageOps.exif_transpose(opened).convert("RGB"))
        except Exception as error:  # foreign input; each decoder raises its own errors
            why = str(error) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                why = "it is no PNG, JPEG, WebP or GIF, or broken"
            raise ImageRefused(f"image {number} cannot be used: {why}") from error
    return images
