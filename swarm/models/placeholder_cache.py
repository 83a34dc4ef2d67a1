"""The client's placeholder for a transformers cache: the length of each sequence, and changes not yet sent.

Keys and values are on the servers. What `generate` does to its cache (append, crop, reorder, repeat) is recorded here
and sent with the next step as a `StepLayout`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache

from swarm.data_structures import StepLayout
from swarm.errors import SessionClosed


class PlaceholderCache(Cache):
    """The cache object that `generate` sees in an inference session. It holds no keys and values.

    Slots are columns of the caller's padded `[sequences, length]` batch; positions count real tokens only. A slot whose
    attention mask is 0 was never sent.

    Args:
        session: the object that computes steps for this cache; opaque here.
    """

    def __init__(self, session: Any) -> None:
        super().__init__(layers=[])
        self._session = weakref.ref(session)  # which has this cache
        self._kept_session: Any = None
        self.length = 0
        self.exact_length = 0
        """How many leading slots have passed all blocks. Behind them, what servers hold may be approximate."""
        self.longest = 0
        """How many slots there were at most since the first one."""
        self.sequences = 0
        self.tokens: torch.Tensor | None = None
        """Token ids `[sequences, length]` of all slots, or None after hidden states came without ids."""
        self._real: torch.Tensor | None = None  # bool [sequences, length]; None while every slot is real
        self._sources: list[int] | None = None  # where sequences were copied from since the last step

    @property
    def session(self) -> Any:
        """The object that computes steps for this cache. Raises `SessionClosed` if nobody has it any more."""
        session = self._session()
        if session is None:
            raise SessionClosed(
                "the inference session of this cache is gone; keep the session for as long as you use its cache"
            )
        return session

    def keep_session(self) -> None:
        """Keep the session for as long as this cache exists: the caller has nothing but the cache."""
        self._kept_session = self.session

    # The interface of a transformers cache.

    def __bool__(self) -> bool:
        """True, as any cache of a model with layers."""
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        return self.sequences or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` slots of every sequence."""
        self.set_length(self.length - abs(tokens_to_remove))

    def reset(self) -> None:
        self.set_length(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        picked = torch.arange(self.sequences)[indices.cpu()]
        self._select(picked.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([sequence for sequence in range(self.sequences) for _ in range(repeats)])

    # The interface for the client's session.

    def set_length(self, length: int) -> None:
        """Roll every sequence back to `length` slots. Raises `ValueError` if fewer slots were computed."""
        if not 0 <= length <= self.length:
            raise ValueError(
                f"position {length} is not between 0 and {self.length}, the number of positions computed so far"
            )
        self.length = length
        self.exact_length = min(self.exact_length, length)
        if self.tokens is not None:
            self.tokens = self.tokens[:, :length]
        if self._real is not None:
            self._real = self._real[:, :length]
        if length == 0:
            self.longest, self.sequences, self.tokens, self._real, self._sources = 0, 0, None, None, None

    def begin_with(self, tokens: torch.Tensor) -> None:
        """Before the first step: one sequence of these token ids `[length]` is computed."""
        self.tokens, self.sequences = tokens.unsqueeze(0), 1
        self.length = self.exact_length = self.longest = len(tokens)

    @property
    def only_tokens(self) -> torch.Tensor | None:
        """The token ids of the only sequence, as far as they have passed all blocks; None where that is not known."""
        if self.sequences != 1 or self.tokens is None or self._real is not None or self._sources is not None:
            return None
        return self.tokens[0, : self.exact_length]

    def layout(self, sequences: int, new: int, mask: torch.Tensor | None) -> tuple[StepLayout, torch.Tensor | None]:
        """What the next step sends, given `new` more slots for each of `sequences` sequences.

        Args:
            mask: attention mask `[sequences, length + new]`, or None if every new slot is real.

        Returns:
            the layout, and which of the new slots are real (bool `[sequences, new]`), None if all are.

        Raises:
            ValueError: the batch or the mask does not continue what was computed.
        """
        if self.sequences not in (0, sequences):
            raise ValueError(
                f"the session has {self.sequences} sequences and cannot continue with {sequences}; roll back to 0 first"
            )
        fresh = self._fresh_slots(sequences, new, mask)
        starts = (self.length,) * sequences if self._real is None else tuple(self._real.sum(1).tolist())
        counts = (new,) * sequences if fresh is None else tuple(fresh.sum(1).tolist())
        return StepLayout(starts, counts, tuple(self._sources) if self._sources is not None else None), fresh

    def commit(
        self,
        sequences: int,
        new: int,
        fresh: torch.Tensor | None,
        tokens: torch.Tensor | None,
        is_exact: bool = True,
    ) -> None:
        """Record the slots of a step that was computed.

        Args:
            is_exact: whether its tokens pass all blocks; False if they may leave inside a server's span.
        """
        if is_exact and self.exact_length == self.length:
            self.exact_length += new
        if self._real is not None or fresh is not None:
            old = self._real if self._real is not None else torch.ones(sequences, self.length, dtype=torch.bool)
            added = fresh if fresh is not None else torch.ones(sequences, new, dtype=torch.bool)
            self._real = torch.cat([old, added], dim=1)
        if self.length == 0:
            self.tokens = tokens
        elif self.tokens is not None:
            self.tokens = torch.cat([self.tokens, tokens], dim=1) if tokens is not None else None
        self.sequences, self.length, self._sources = sequences, self.length + new, None
        self.longest = max(self.longest, self.length)

    def common_prefix(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> int:
        """How many leading slots of `tokens` `[sequences, n]` are computed, in all sequences and with the same mask."""
        if self.tokens is None or tokens.shape[0] != self.sequences:
            return 0
        span = min(self.length, tokens.shape[1])
        same = self.tokens[:, :span] == tokens[:, :span].cpu()
        real = self._real[:, :span] if self._real is not None else torch.ones_like(same)
        same &= real == (mask[:, :span].cpu().bool() if mask is not None else torch.ones_like(same))
        return int(same.all(dim=0).long().cumprod(0).sum())

    def _fresh_slots(self, sequences: int, new: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None:
            return None
        if mask.shape != (sequences, self.length + new):
            raise ValueError(
                f"the attention mask is {list(mask.shape)}; with {self.length} tokens computed and {new} new ones it "
                f"has to be [{sequences}, {self.length + new}]"
            )
        real = mask.cpu().bool()
        past = self._real if self._real is not None else torch.ones(sequences, self.length, dtype=torch.bool)
        if not torch.equal(real[:, : self.length], past):
            raise ValueError("the attention mask changed for tokens that are already computed; roll the session back")
        fresh = real[:, self.length :]
        return None if bool(fresh.all()) else fresh

    def _select(self, sequences: list[int]) -> None:
        if self.length == 0:
            return
        earlier = self._sources if self._sources is not None else list(range(self.sequences))
        self._sources = [earlier[sequence] for sequence in sequences]
        index = torch.tensor(sequences)
        self.sequences = len(sequences)
        self._real = self._real[index] if self._real is not None else None
        self.tokens = self.tokens[index] if self.tokens is not None else None
