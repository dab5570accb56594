"""Turns a job's target, draft and decoding sections into the parts that decode.

What every worker of a replica must agree on (`Setup`) is worked out once, without loading any weights, so that
each worker can load its own part and the scheduler's process none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pipeline.cohorts import Cohorts
from pipeline.decode import Decoder, Drafter, Verifier
from pipeline.engine.checkpoint import Checkpoint, resolve
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.drafters.ngram import NgramDrafter
from pipeline.engine.intersection import Intersection, check_vocabularies
from pipeline.engine.parallel import Group, device_of, require_device, require_divisible
from pipeline.engine.runner import Runner
from pipeline.engine.translation import TranslatingRunner
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import ConfigError, ModelError
from pipeline.scheduler import Homes, Limits, Scheduler
from pipeline.wording import Wording

if TYPE_CHECKING:
    from pipeline.config import DraftConfig, JobConfig

DRAFT_TOKENS = 4  # `draft_tokens: auto`: a block of five costs little more than one token on most machines
BATCH = {"cpu": 16, "cuda": 64}  # `batch: auto`: sequences at once
PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}  # prompt tokens per step


@dataclass(frozen=True, slots=True)
class Setup:
    """What the workers of one replica agree on."""

    target: Checkpoint
    draft: Checkpoint | None
    intersection: Intersection | None  # where the draft has another tokenizer
    limits: Limits
    eos: tuple[int, ...]
    device: str

    @property
    def vocabulary(self) -> int:
        """Ids below this may be proposed and drawn."""
        assert self.limits.vocabulary is not None
        return self.limits.vocabulary


def agree(config: JobConfig) -> Setup:
    """Work out a replica's setup. ModelError or ConfigError where target and draft do not fit together."""
    target = resolve(config.target.model)
    draft_config = drafting(config)
    draft = intersection = None
    if draft_config is not None and draft_config.kind == "model":
        assert draft_config.model is not None
        draft = resolve(draft_config.model)
        if draft_config.vocabulary == "intersect":
            intersection = check_vocabularies(target, draft)
        else:
            check_same_tokenizer(target, draft)
        require_divisible(draft, draft_config.gpus, "draft.gpus")
    device = device_of(config.target.gpus)
    require_divisible(target, config.target.gpus)
    decoding = config.decoding
    context = target.context_limit()
    if decoding.context != "auto":
        if decoding.context > context:
            raise ConfigError(f"decoding.context: {decoding.context} is more than the model's {context} tokens")
        context = decoding.context
    same = draft is not None and intersection is None
    vocabulary = min(_vocabulary(checkpoint) for checkpoint in (target, draft if same else target) if checkpoint)
    draft_tokens = DRAFT_TOKENS if decoding.draft_tokens == "auto" else decoding.draft_tokens
    limits = Limits(
        slots=BATCH[device] if decoding.batch == "auto" else decoding.batch,
        context=context,
        draft_tokens=0 if draft_config is None else draft_tokens,
        prefill_chunk=PREFILL_CHUNK[device],
        vocabulary=vocabulary,
        draft_context=None if draft is None else draft.context_limit(),
    )
    return Setup(target, draft, intersection, limits, target.eos_ids(), device)


def drafting(config: JobConfig) -> DraftConfig | None:
    """The job's drafter, or None for plain decoding."""
    chosen = config.draft[0] if config.draft else None
    return None if chosen is None or chosen.kind == "none" or config.decoding.draft_tokens == 0 else chosen


def check_same_tokenizer(target: Checkpoint, draft: Checkpoint) -> None:
    """ModelError with the first token that target and draft number differently."""
    ours, theirs = ({i: token for token, i in c.tokenizer().get_vocab().items()} for c in (target, draft))
    if ours == theirs:
        return
    first = next(i for i in range(max(*ours, *theirs) + 1) if ours.get(i) != theirs.get(i))
    raise ModelError(
        f"draft.model: {draft.name} has another tokenizer than {target.name}: token {first} is "
        f"{theirs.get(first)!r} there and {ours.get(first)!r} here; choose a draft of the same family, or "
        "draft.vocabulary: intersect"
    )


def load_verifier(config: JobConfig, setup: Setup, group: Group | None = None) -> TargetVerifier:
    """Load the target, or one rank's part of it.

    Every rank of a group verifies every request: they come to the same verdicts, and scrub the same slots.
    """
    limits, ranks = setup.limits, config.target.gpus
    if ranks > 1 and (group is None or group.ranks != ranks):
        raise ConfigError(f"target.gpus: {ranks} ranks need a worker each, and this is one process: set it to 1")
    require_device(setup.device, "target.gpus")
    runner = Runner.load(
        setup.target, config.target.dtype, setup.device, limits.slots, limits.context, setup.vocabulary, group
    )
    chosen, rule = drafting(config), config.decoding.rule
    chooses = chosen is not None and chosen.kind == "model" and chosen.sampling == "auto" and rule != "coupled"
    return TargetVerifier(runner, rule, setup.eos, compare_sampling=chooses)


def load_drafter(config: JobConfig, setup: Setup, group: Group | None = None) -> Drafter | None:
    """Load the drafter, if the job has one, or one rank's part of it.

    Every rank of a group drafts for every request: they draw the same tokens.
    """
    chosen, limits = drafting(config), setup.limits
    if chosen is None:
        return None
    if setup.draft is None:
        return NgramDrafter(limits.slots)
    assert limits.draft_context is not None
    both = setup.intersection
    # Another tokenizer may need more tokens for the same text; what is longer still goes on without drafts.
    context = min(limits.draft_context, limits.context if both is None else 2 * limits.context)
    if chosen.gpus > 1 and (group is None or group.ranks != chosen.gpus):
        raise ConfigError(f"draft.gpus: {chosen.gpus} ranks need a worker each, and this is one process: set it to 1")
    vocabulary = setup.vocabulary if both is None else both.draft_vocabulary
    device = device_of(chosen.gpus)
    require_device(device, "draft.gpus")
    inner = Runner.load(setup.draft, chosen.dtype, device, limits.slots, context, vocabulary, group)
    runner = inner if both is None else TranslatingRunner(inner, both)
    coupled = config.decoding.rule == "coupled"
    return ModelDrafter(runner, chosen.support, chosen.sampling, limits.prefill_chunk, coupled, setup.eos)


def make_decoder(
    config: JobConfig,
    setup: Setup,
    verifier: Verifier,
    drafter: Drafter | None,
    salt: int = 0,
    first_handle: int = 0,
    homes: Homes | None = None,
    notice: Callable[[str], None] | None = None,
    apart: bool = False,
) -> Decoder:
    """Join the parts. `salt` tells a repeated answer's randomness from an earlier one's (DESIGN section 5).

    Under `coupled` a text depends on seed and target alone, so there the salt is always 0. `apart`: target and drafter
    are in workers of their own, and may work on different cohorts at a time.
    """
    wording = Wording(setup.target.tokenizer())
    limits = setup.limits if drafter is not None else replace(setup.limits, draft_tokens=0)
    scheduler = Scheduler(
        limits,
        setup.eos,
        config.seed,
        0 if config.decoding.rule == "coupled" else salt,
        drafter_keeps_proposals=drafter is not None and drafter.keeps_proposals,
        draft_chunk=None if drafter is None else drafter.chunk,
        wording=wording,
        first_handle=first_handle,
    )
    decoder = Decoder(scheduler, verifier, drafter, wording, cohorts=Cohorts(limits.slots) if apart else None)
    decoder.homes, decoder.notice = homes or decoder.homes, notice or decoder.notice
    return decoder


def set_threads(threads: int) -> None:
    """Bound torch's threads in this process."""
    torch.set_num_threads(threads)


def _vocabulary(checkpoint: Checkpoint) -> int:
    """Ids that stand for a token: the embedding matrix may be padded beyond them."""
    return min(len(checkpoint.tokenizer()), int(checkpoint.config().vocab_size))
