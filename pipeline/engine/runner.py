"""One model with its slot cache: runs packed passes and says where its logits are wanted.

The runner trusts no history: every request names, per sequence, how many cache entries are valid, and the
runner checks that its slot holds at least that many of that very sequence (`CacheMiss` otherwise). It knows
nothing of laws, drafts or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.engine.attention import LAYOUT_ARGUMENT, NAME, build_layout
from pipeline.engine.checkpoint import Checkpoint, check_supported, load_model
from pipeline.engine.kv_cache import KVCache
from pipeline.engine.linear import fuse_norms, pack_linears
from pipeline.engine.parallel import Group, localise
from pipeline.engine.token_store import TokenStore
from pipeline.errors import CacheMiss, ModelError
from pipeline.messages import Feed, Opening, PrefixCopy

NOBODY = -1


class Runner:
    """A causal language model and the sequences that it holds."""

    def __init__(self, model: torch.nn.Module, slots: int, context: int, vocabulary: int, ranks: int = 1) -> None:
        """`slots` are there at once, and more when they are fed. `context` bounds prompt and generated tokens; ids >=
        `vocabulary` never appear in logits.

        A model that is divided among `ranks` caches the keys and values of its own heads.
        """
        config: Any = model.config
        attention = config._attn_implementation
        if attention != NAME:
            raise ModelError(f"the model was loaded with attention {attention!r}: load it with {NAME!r}")
        parameter = next(model.parameters())
        self.model = model
        self.device = parameter.device
        self.vocabulary = vocabulary
        self.layers = int(config.num_hidden_layers)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = config.num_key_value_heads // ranks
        self.cache = KVCache(self.layers, slots, kv_heads, head_dim, context, parameter.dtype, self.device)
        self.owners = np.full(slots, NOBODY, dtype=np.int64)  # [slots] handle of the sequence in each slot
        self.held = np.zeros(slots, dtype=np.int64)  # [slots] cache entries that were computed for it
        self.openings: dict[int, Opening] = {}
        self.texts = TokenStore(slots)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        slots: int,
        context: int,
        vocabulary: int,
        group: Group | None = None,
    ) -> Runner:
        """Load a checkpoint for packed passes on `device`, its weights laid out for this processor.

        As one of a `group`, load this rank's shard. All ranks must then be given the same passes in the same order.
        """
        check_supported(checkpoint.config())
        ranks = 1 if group is None else group.ranks
        model = load_model(checkpoint, dtype, device, NAME, ranks)
        if ranks > 1:
            localise(model)
        fuse_norms(model)
        if device == "cpu":
            pack_linears(model)
        return cls(model, slots, context, vocabulary, ranks)

    def open(self, openings: Sequence[Opening], copies: Sequence[PrefixCopy], feed: Feed) -> None:
        """Take in new sequences and prefix copies; raise `CacheMiss` for rows whose prefix is not held."""
        self._ensure_slots(slots_named(feed, copies))
        for c in copies:  # one by one: a copy may be the source of a later one
            if self.held[c.source] < c.length:
                raise CacheMiss(feed.sequences[feed.slots == c.target])
            self.cache.copy([c])
            self.texts.copy(c)
            self.held[c.target] = c.length
        slot_of = dict(zip(feed.sequences.tolist(), feed.slots.tolist(), strict=True))
        for opening in openings:
            slot = slot_of[opening.sequence]
            self.openings.pop(int(self.owners[slot]), None)
            self.owners[self.owners == opening.sequence] = NOBODY  # it may have sat elsewhere before
            self.openings[opening.sequence] = opening
            self.owners[slot] = opening.sequence
        missing = (self.owners[feed.slots] != feed.sequences) | (self.held[feed.slots] < feed.cached)
        if missing.any():
            raise CacheMiss(feed.sequences[missing])

    @torch.inference_mode()
    def forward(self, feed: Feed, extra_tokens: Sequence[np.ndarray], wanted_R: np.ndarray) -> Tensor:
        """Run one packed pass and return logits `[R, vocabulary]` at the packed positions `wanted_R`.

        Row b feeds its tokens of `feed` followed by `extra_tokens[b]` (drafted ones, possibly none).
        """
        extra_B = np.array([len(extra) for extra in extra_tokens], dtype=np.int64)
        layout = build_layout(self.cache, feed, extra_B, self.device)
        tokens_N = torch.as_tensor(_interleave(feed, extra_tokens), device=self.device)
        self.held[feed.slots] = feed.cached  # should the pass fail, nothing beyond is relied on
        self.texts.write(feed, extra_tokens)
        logits: Tensor = self.model(
            input_ids=tokens_N[None],
            position_ids=layout.positions_N[None],
            logits_to_keep=torch.as_tensor(wanted_R, device=self.device),
            use_cache=False,
            **{LAYOUT_ARGUMENT: layout},
        ).logits
        assert layout.calls == self.layers, f"{layout.calls} of {self.layers} layers used packed attention"
        self.held[feed.slots] = feed.cached + feed.lengths + extra_B
        return logits[0, :, : self.vocabulary]

    def scrub(self, slot: int) -> None:
        """Forget a slot that met non-finite numbers."""
        self.cache.scrub(slot)
        self.held[slot] = 0

    def release(self) -> None:
        """Forget all sequences, and give the memory back that held them."""
        self.cache.release()
        self.texts.release()
        self.owners = self.owners[:0]
        self.held = self.held[:0]
        self.openings.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _ensure_slots(self, slots: int) -> None:
        self.cache.ensure_slots(slots)
        self.owners = grown(self.owners, slots, NOBODY)
        self.held = grown(self.held, slots, 0)


def slots_named(feed: Feed, copies: Sequence[PrefixCopy]) -> int:
    """One more than the highest slot in a request."""
    return 1 + max([-1, *feed.slots.tolist(), *(slot for c in copies for slot in (c.source, c.target))])


def grown(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    """An array with room for `length` values: itself, or a copy of at least twice its length, `fill` behind its own."""
    if length <= len(values):
        return values
    more = max(length, 2 * len(values)) - len(values)
    return np.concatenate([values, np.full(more, fill, dtype=values.dtype)])


def _interleave(feed: Feed, extra_tokens: Sequence[np.ndarray]) -> np.ndarray:
    """The tokens of a pass, row by row: those fed, then the extra ones."""
    if not any(len(extra) for extra in extra_tokens):
        return feed.tokens
    fed = np.split(feed.tokens, np.cumsum(feed.lengths)[:-1])
    return np.concatenate([part for pair in zip(fed, extra_tokens, strict=True) for part in pair])
