"""A model on several ranks: which models divide, how ranks meet, and the shards of a model as plain layers.

transformers shards the weights by its own tensor-parallel plan while it loads them, so no rank ever holds the whole
model. Its hooks around every layer are then replaced by layers that compute on plain tensors and do one collective
where the plan needs one: after a projection split by inputs (sum), after the head (gather) and after the embedding
(sum). The logits are gathered, not computed twice, so all ranks see the same bits and come to the same verdicts; ranks
are kept in step by giving each the same requests, and by nothing else.

Setting `NIGHTDESK_PRETEND_GPUS=1` in the environment of every process, the nodes of a Ray cluster included, lets
`gpus` of target and draft stand for ranks on the processor, whatever the machine has. It is slow, and meant for tests.

Knows nothing of Ray, requests or laws. Shapes: N tokens, D hidden size, V vocabulary, W widest shard of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from pipeline.engine.checkpoint import Checkpoint
from pipeline.errors import ConfigError, ModelError

PRETEND = "NIGHTDESK_PRETEND_GPUS"
BACKEND = {"cpu": "gloo", "cuda": "nccl"}
JOIN_SECONDS = 600.0  # for all ranks' processes to start


def device_of(gpus: int) -> str:
    """`cuda` or `cpu`: what a model on `gpus` GPUs computes on; this process may only schedule, and have none."""
    return "cuda" if gpus and os.environ.get(PRETEND) != "1" else "cpu"


def require_device(device: str, key: str) -> None:
    """ConfigError at `key` where a model is to be loaded on a GPU and this process has none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key}: no CUDA device here; set it to 0 to run on the processor")


def require_divisible(checkpoint: Checkpoint, ranks: int, key: str = "target.gpus") -> None:
    """ConfigError at `key`, with the arithmetic, unless every rank gets the same number of heads. Loads no weights."""
    config = checkpoint.config()
    counts = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    for what, count in counts.items():
        if ranks > 1 and count % ranks:
            fitting = [n for n in range(1, min(counts.values()) + 1) if not any(c % n for c in counts.values())]
            raise ConfigError(
                f"{key}: {checkpoint.name} has {count} {what}, and {count} = {ranks} × {count // ranks} + "
                f"{count % ranks} cannot be divided among {ranks} ranks: use one of {', '.join(map(str, fitting))}"
            )


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among the ranks of a model, after it has joined them."""

    rank: int
    ranks: int


def host(address: str) -> dist.TCPStore:
    """Where the ranks meet, on a free port of `address` (see `.port`). Rank 0 keeps it alive and joins through it."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_SECONDS))


def visit(address: str, port: int) -> dist.TCPStore:
    """The meeting place of rank 0, seen from another rank."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))


def join(store: dist.Store, rank: int, ranks: int, device: str, timeout: float) -> Group:
    """Wait for the other ranks, and become one of them: once in the life of a process.

    A collective that takes longer than `timeout` seconds fails; so does, sooner where the network says so, one with a
    rank that is gone. Nothing can be done then but to end the process.
    """
    store.set(f"nightdesk/{rank}", "here")
    store.wait([f"nightdesk/{i}" for i in range(ranks)], timedelta(seconds=JOIN_SECONDS))
    local = rank % torch.cuda.device_count() if device == "cuda" else rank  # Ray shows each actor its own devices alone
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(ranks))
    bound = torch.device("cuda", local) if device == "cuda" else None
    if bound is not None:
        torch.cuda.set_device(bound)
    dist.init_process_group(
        BACKEND[device], store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout), device_id=bound
    )
    return Group(rank, ranks)


def localise(model: nn.Module) -> None:
    """Replace what transformers has sharded by layers on plain tensors. ModelError for a shard of another kind."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            sharded = {key: p for key, p in child.named_parameters(recurse=False) if isinstance(p, DTensor)}
            child.__dict__.pop("forward", None)  # transformers' hook; the class's own is behind it
            if not sharded:
                continue
            (placement,) = sharded["weight"].placements
            rows = int(sharded["weight"].shape[0])
            for key, parameter in sharded.items():
                setattr(child, key, nn.Parameter(parameter.to_local(), requires_grad=False))
            setattr(module, name, _local_layer(child, placement, rows, child is head))


def _local_layer(child: nn.Module, placement: Placement, rows: int, is_head: bool) -> nn.Module:
    """The layer that stands for `child`, whose parameters are this rank's shard of a weight with `rows` rows."""
    if isinstance(child, nn.Embedding) and placement == Shard(0):
        return ShardedEmbedding(child, rows)
    if type(child) is nn.Linear and placement in {Shard(0), Shard(1)}:
        child.out_features, child.in_features = child.weight.shape
        if placement == Shard(1):
            return SummedLinear(child)
        return GatheredLinear(child, rows) if is_head else child
    raise ModelError(f"target.gpus: {type(child).__name__} cannot be divided among ranks: use 1")


class SummedLinear(nn.Module):
    """A linear layer of which every rank has the columns for its own inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias  # every rank has it whole: it is added once, to the sum
        linear.bias = None  # type: ignore[assignment]
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).contiguous()
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """A linear layer of which every rank has some rows; the outputs are put together on all of them."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.linear = linear
        self.rows = rows
        self.widest = _widest(rows)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y_NW = nn.functional.pad(y.reshape(-1, y.shape[-1]), (0, self.widest - y.shape[-1])).contiguous()
        shards = [torch.empty_like(y_NW) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, y_NW)
        whole_NV = torch.cat(shards, dim=-1)[:, : self.rows]  # only the last shards are narrower
        return whole_NV.reshape(*y.shape[:-1], self.rows)


class ShardedEmbedding(nn.Module):
    """An embedding of which every rank has the vectors of some ids; zeros stand for the others, and are summed."""

    def __init__(self, embedding: nn.Embedding, rows: int) -> None:
        super().__init__()
        self.embedding = embedding
        embedding.padding_idx = None  # of use to gradients alone, and not an id of this shard
        self.held = embedding.weight.shape[0]
        self.first = dist.get_rank() * _widest(rows)

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        here = (local >= 0) & (local < self.held)
        y: Tensor = self.embedding(local.where(here, 0))
        y = y.masked_fill(~here[..., None], 0)  # also where a vector is not finite
        dist.all_reduce(y)
        return y


def _widest(rows: int) -> int:
    """Rows of the first shards, as `torch.chunk` cuts them."""
    return -(-rows // dist.get_world_size())
