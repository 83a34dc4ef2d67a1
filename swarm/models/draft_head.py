"""A draft head: one decoder layer that guesses a model's hidden states ahead, from those that its clients receive.

EAGLE's form (Li et al., 2024, section 3): the hidden state that the last block leaves of a token, and the embedding of
the token behind it, give about what the last block will leave of that one. The model's own norm and head read it, and
it takes the place of the real one for the next guess. So every model can have a draft, whatever its tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaModel

from swarm.errors import AdapterError, AdapterMismatch
from swarm.models.adapters.adapter_files import MAX_WEIGHTS_BYTES, STORED_DTYPES, AdapterSource
from swarm.models.exits.trained_exits import BaseModel, require_base
from swarm.models.known_text import common_length

HEAD_FILE = "draft_head.safetensors"
FORMAT = "swarm-draft-head-1"
MAX_HEAD_WIDTH = 128
"""Values of an attention head, at most."""

WINDOW_TOKENS = 256
"""The layer learns from texts of this length, and sees at most twice as many tokens."""


class DraftHead(nn.Module):
    """Two norms, a linear map that joins their outputs, and a decoder layer.

    Args:
        base: the model for which it is.
        embedding_size: values of the model's embeddings, `E` below.
    """

    def __init__(self, base: BaseModel, embedding_size: int) -> None:
        super().__init__()
        self.base, width = base, base.hidden_size
        heads = width // math.gcd(width, MAX_HEAD_WIDTH)
        config = LlamaConfig(
            vocab_size=1,
            hidden_size=width,
            intermediate_size=max(16, 8 * width // 3 // 16 * 16),
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=2 * WINDOW_TOKENS,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.hidden_norm, self.token_norm = nn.RMSNorm(width), nn.RMSNorm(embedding_size)
            self.join = nn.Linear(embedding_size + width, width, bias=False)
            self.layer = LlamaModel(config)
        self.layer.embed_tokens, self.layer.norm = nn.Identity(), nn.Identity()

    def forward(
        self, hidden_RTH: torch.Tensor, embedded_RTE: torch.Tensor, cache: DynamicCache | None = None
    ) -> torch.Tensor:
        """About the hidden states of some tokens, `[R, T, H]`.

        Args:
            hidden_RTH: of the tokens before them, one each.
            embedded_RTE: the tokens.
            cache: the layer's keys and values of the tokens before all these; theirs are added.
        """
        both = torch.cat([self.token_norm(embedded_RTE), self.hidden_norm(hidden_RTH)], -1)
        output = self.layer(inputs_embeds=self.join(both), past_key_values=cache, use_cache=cache is not None)
        found_RTH: torch.Tensor = output.last_hidden_state
        return found_RTH

    def save(self, folder: str | Path) -> None:
        """Write it into `folder`, which is created if it is missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"format": FORMAT, "name": self.base.name, "revision": self.base.revision}
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / HEAD_FILE, metadata=metadata)

    @classmethod
    def load(cls, source: AdapterSource, base: BaseModel, embedding_size: int) -> DraftHead:
        """Read what `save` wrote, in float32.

        Args:
            source: a folder, or a repository on the hub.
            base, embedding_size: of the model that it is for.

        Raises:
            AdapterMismatch: it was trained for another model or revision.
            AdapterError: the file is missing or broken.
        """
        path = source.fetch(HEAD_FILE, MAX_WEIGHTS_BYTES)
        if path is None:
            raise AdapterError(f"{source.name} has no {HEAD_FILE}; model.save_draft writes one")
        head = cls(base, embedding_size)
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                require_base(stored.metadata() or {}, base, path, FORMAT, "a draft head", "model.train_draft")
                head.load_state_dict(_read(stored, head.state_dict(), path))
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{path} is not a readable safetensors file: {error}") from error
        return head


def _read(stored: safe_open, expected: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, each as `expected` has it; shapes are checked before anything is read."""
    names = set(stored.keys())
    if names != expected.keys():
        raise AdapterMismatch(f"{path} has other tensors than a draft head: {sorted(names ^ expected.keys())[:4]}")
    for name, tensor in expected.items():
        if (shape := stored.get_slice(name).get_shape()) != list(tensor.shape):
            raise AdapterMismatch(f"{path}: {name} has the shape {shape}; this model needs {list(tensor.shape)}")
    tensors = {name: stored.get_tensor(name) for name in expected}
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES or not bool(tensor.isfinite().all()):
            raise AdapterError(f"{path}: {name} holds NaN or infinity, or is {tensor.dtype}")
    return tensors


class HeadText:
    """A text as a draft head knows it: the hidden states that the model has computed, and guesses behind them.

    Where real ones come to stand, the guesses behind them are made again, all at once, each from the one that was
    guessed before. That is one pass over a few tokens, and the next guess is nearly as good as if each had waited for
    the one before it.

    Args:
        embed: the model's embeddings.
    """

    def __init__(self, head: DraftHead, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._head, self._embed = head, embed
        self._tokens: list[int] = []
        self._begin_at(0)

    def _begin_at(self, position: int) -> None:
        self._begin = position
        self._hidden: list[torch.Tensor] = []
        """From this position on: `_real` of the model's, and guesses."""
        self._real = 0
        self._forget()

    def _forget(self) -> None:
        """Compute keys and values anew."""
        self._cache, self._kept = DynamicCache(), 0

    def learn(self, first: int, hidden_NH: torch.Tensor) -> None:
        """Take the hidden states that the last block has left of the tokens from position `first` on. They stand."""
        skipped = max(0, len(hidden_NH) - WINDOW_TOKENS)
        if skipped or first != self._begin + self._real:
            self._begin_at(first + skipped)
            hidden_NH = hidden_NH[skipped:].clone()  # a part would keep all of them in memory
        rows = hidden_NH.to(self._head.join.weight)
        self._hidden[self._real : self._real + len(rows)] = rows.unbind()
        self._real += len(rows)

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """About the hidden state `[H]` of the last of these tokens; None if too little is known of those before."""
        same = common_length(self._tokens, tokens)
        del self._hidden[max(self._real, same - self._begin) :]
        self._tokens = list(tokens)
        last = len(tokens) - 1 - self._begin
        if last > 2 * WINDOW_TOKENS and (skipped := min(last - WINDOW_TOKENS, self._real - 1)) > 0:
            del self._hidden[:skipped]
            self._begin, self._real, last = self._begin + skipped, self._real - skipped, last - skipped
            self._forget()
        if last < 1 or not self._real:
            return None
        if last < self._real:
            return self._hidden[last]
        self._cache.crop(self._kept - self._cache.get_seq_length())
        done = self._kept
        while done < last:
            # Token number n needs the hidden state of the one before it.
            ready = min(len(self._hidden), last)
            hidden_1NH = torch.stack(self._hidden[done:ready]).unsqueeze(0)
            behind = tokens[self._begin + done + 1 : self._begin + ready + 1]
            ids = torch.tensor([behind], device=hidden_1NH.device)
            found_NH = self._head(hidden_1NH, self._embed(ids).to(hidden_1NH.dtype), self._cache)[0]
            known = max(self._real - 1 - done, 0)
            self._hidden[done + 1 + known :] = found_NH[known:].unbind()
            done = ready
        self._kept = min(self._real, last)
        return self._hidden[last]
