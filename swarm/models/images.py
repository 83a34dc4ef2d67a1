"""Images in a prompt: the wrapper's own tower and projector, at the client, and what they put among the tokens.

Nothing of a wrapper is ported. Its own class runs up to where it calls its language model, whose place
`_LanguageModel` takes: what that gets is what goes through the blocks.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from swarm.errors import CheckpointError, ImageRefused, SwarmError, UsageError
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.partial_loading import load_partial_model
from swarm.models.cutting import families

MAX_COMPUTED_VALUES = 1 << 26
"""How many values a tower may compute by its config alone, such as rotary frequencies for all places of a patch."""


@dataclass(frozen=True)
class PromptImages:
    """A prompt with images among its tokens.

    Attributes:
        tokens: ids `[sequences, slots]`, as the caller passed them.
        marks: the same, but where an image stands, negative numbers that tell its features from others.
        hidden: `[sequences, slots, hidden_size]`: the features, and elsewhere the tokens' embeddings.
    """

    tokens: torch.Tensor
    marks: torch.Tensor
    hidden: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> PromptImages:
        """Some of the sequences."""
        return PromptImages(self.tokens[part], self.marks[part], self.hidden[part])

    def insert(
        self, tokens: torch.Tensor, past: int, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What goes into the blocks for the slots behind `past`, and their marks; None behind the prompt.

        Args:
            tokens: ids `[rows, new]`; there may be several rows for each sequence, one after another.
        """
        part = slice(past, past + tokens.shape[1])
        copies, shown = len(tokens) // len(self), self.tokens[:, part].shape[1]
        if not shown or not copies:
            return None
        known, marks, features = (one[:, part].repeat_interleave(copies, 0) for one in vars(self).values())
        is_image = (marks < 0) & (tokens[:, :shown] == known)  # not where guidance computes another text
        marks = torch.cat([torch.where(is_image, marks, tokens[:, :shown]), tokens[:, shown:]], dim=1)
        hidden = embed(marks.clamp(min=0))
        hidden[:, :shown] = torch.where(is_image.unsqueeze(-1), features, hidden[:, :shown])
        return hidden, marks


class ImageTower:
    """What turns the images of prompts into features, loaded when the first image comes.

    Args:
        checkpoint: of the wrapper.
        model: the client's model, whose embeddings the tokens get.
        dtype: of the tower.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, dtype: torch.dtype) -> None:
        self._checkpoint, self._model, self._dtype = checkpoint, model, dtype
        self._wrapper: Any = None
        self._lock = threading.Lock()
        """Held while it is loaded, and while it computes: its activations may take gigabytes."""

    def take(self, tokens: Any, arguments: dict[str, Any]) -> PromptImages:
        """Take the images out of the arguments of `generate`.

        Raises:
            UnsupportedModel: the model takes none.
            CheckpointError: its tower is not among the files, or does not fit its config.
            ImageRefused: the wrapper finds that the images do not fit the tokens.
        """
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
            raise UsageError("images go with the ids of the prompt's tokens: pass input_ids [sequences, tokens]")
        with self._lock, torch.no_grad():
            if self._wrapper is None:
                self._wrapper = self._load()
            embed = self._model.get_input_embeddings()
            taken, texts = (signature(type(one).forward).parameters.keys() for one in (self._wrapper, self._model))
            names = {name for name in taken - texts if isinstance(arguments.get(name), (torch.Tensor, list))}
            images = {name: arguments.pop(name) for name in names}
            for name, one in images.items():  # as a processor's own `to` does: it makes float32, whatever the model is
                if isinstance(one, torch.Tensor):
                    images[name] = one.to(embed.weight.device, self._dtype if one.is_floating_point() else None)
            self._wrapper.to(embed.weight.device)
            hidden, plain = self._merge(tokens, images), embed(tokens)
        return PromptImages(tokens, _marks(tokens, hidden, (hidden != plain).any(-1)), hidden)

    def _merge(self, tokens: torch.Tensor, images: dict[str, Any]) -> torch.Tensor:
        try:
            self._wrapper(input_ids=tokens, use_cache=False, **images)
        except _Merged as merged:
            hidden: torch.Tensor = merged.args[0]
            return hidden
        except ValueError as error:
            raise ImageRefused(f"the images do not fit the tokens of the prompt: {error}") from error
        raise SwarmError("the wrapper has computed a prompt without its language model")

    def _load(self) -> Any:
        config = copy.deepcopy(self._checkpoint.whole_config())
        families.check_images(config)
        text = config.get_text_config(decoder=True)
        config.tie_word_embeddings = text.tie_word_embeddings = False  # it is built without embeddings and head
        tensors = self._checkpoint.tower_tensors()
        if not tensors:
            raise CheckpointError(
                f"{self._checkpoint.source} has no weights for images: those that take part in a swarm share the "
                "language model only. Load the model from the hub or from its folder"
            )

        def cut(wrapper: PreTrainedModel) -> None:
            inside = (name for name, one in wrapper.named_modules() if type(getattr(one, "config", None)) is type(text))
            path, _, name = next(inside).rpartition(".")
            setattr(wrapper.get_submodule(path), name, _LanguageModel(self._model))
            if hasattr(wrapper, "lm_head"):
                wrapper.lm_head = nn.Identity()
            computed = sum(one.numel() for one in wrapper.buffers())  # from the config alone, when it leaves "meta"
            if computed > MAX_COMPUTED_VALUES:
                raise CheckpointError(
                    f"config.json describes a tower that computes {computed} values for its positions"
                )

        try:
            wrapper_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
            return load_partial_model(wrapper_class, config, cut, tensors, self._dtype).eval()
        except CheckpointError:
            raise
        except Exception as error:  # a wrapper's code raises anything if the sizes of a config do not go together
            raise CheckpointError(
                f"no tower can be built by config.json of {self._checkpoint.source}: {error}"
            ) from error


class _Merged(Exception):
    """Ends a wrapper's forward where it calls its language model, with the hidden states that that would get."""


class _LanguageModel(nn.Module):
    """Stands in a wrapper where its language model does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that torch does not make it a child of the wrapper

    def get_input_embeddings(self) -> Any:
        return self._model[0].get_input_embeddings()

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **more: Any) -> Any:
        raise _Merged(inputs_embeds)


def _marks(tokens: torch.Tensor, hidden: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
    """The tokens, where images stand a negative digest of the features: the tokens of two images are the same."""
    marks = tokens.clone()
    rows = hidden[is_image].contiguous().cpu().view(torch.uint8)
    digests = b"".join(hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest() for row in rows)
    numbers = torch.frombuffer(bytearray(digests), dtype=torch.long) if digests else tokens.new_zeros(0)
    marks[is_image] = numbers.bitwise_or(torch.iinfo(torch.long).min).to(marks.device)
    return marks
