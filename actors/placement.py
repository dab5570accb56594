"""Where workers run: job file and cluster → what each worker gets. A pure function; knows nothing of Ray.

`_Rules.split` says what the workers that share a node get of it, or that they do not fit; everything else asks it.
The search is exact: if there is a way to seat the wanted replicas and draft workers, one is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from actors.node import Choice, Node
from pipeline.config import DraftConfig, JobConfig
from pipeline.engine.assembly import drafting
from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one worker may use of a node."""

    node: Node
    cores: int  # reserved; 0 where it is only seldom at work, or the node has fewer cores than GPUs
    gpus: int = 0
    choice: Choice = field(default_factory=Choice)  # other nodes that would do

    @property
    def threads(self) -> int:
        """For torch."""
        return max(1, self.cores)

    def describe(self) -> str:
        """In a few words, for people."""
        cores = {0: "no core of its own", 1: "1 core"}.get(self.cores, f"{self.cores} cores")
        return f"{cores} and {self.gpus} GPU" if self.gpus else cores


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """One replica's workers, all on one node."""

    separate: bool
    ranks: tuple[Bundle, ...]  # of the target. Colocated: one, and the replica itself is in it, drafter included
    replica: Bundle | None = None  # of its own; None: the process that schedules shares the first rank's bundle

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All that it reserves."""
        return self.ranks if self.replica is None else (*self.ranks, self.replica)

    @property
    def node(self) -> Node:
        return self.ranks[0].node

    def describe_ranks(self) -> str:
        """In a few words, for people."""
        each = self.ranks[0].describe()
        return f"{len(self.ranks)} × ({each})" if len(self.ranks) > 1 else each


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's workers. Colocated: drafters live in their replicas. Separate: draft models are a pool that all use."""

    replicas: tuple[ReplicaPlacement, ...]  # as many as the job wants, or as the cluster holds: never none
    drafts: tuple[Bundle, ...] = ()

    @property
    def separate(self) -> bool:
        return self.replicas[0].separate

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All that is reserved."""
        return tuple(bundle for each in self.replicas for bundle in each.bundles) + self.drafts

    def describe(self) -> str:
        """In a few words, for people."""
        several = f"{len(self.replicas)} replicas, " if len(self.replicas) > 1 else ""
        return f"Ray, {several}{self._describe_workers()}"

    def _describe_workers(self) -> str:
        target = self.replicas[0].describe_ranks()
        if not self.separate:
            return f"colocated, {target}"
        drafts = "".join(f", draft {bundle.describe()}" for bundle in self.drafts)
        return f"separate: target {target}{drafts}"

    def by_node(self) -> list[tuple[Node, tuple[str, ...]]]:
        """Who sits on each node that is used, in words."""
        seats: dict[str, tuple[Node, list[str]]] = {}
        for number, each in enumerate(self.replicas):
            who = "target" if self.separate else "replica"
            there = seats.setdefault(each.node.name, (each.node, []))[1]
            there.append(f"{who} {number}: {each.describe_ranks()}")
            if each.replica is not None:
                there.append(f"replica {number}: {each.replica.describe()}")
        for number, bundle in enumerate(self.drafts):
            seats.setdefault(bundle.node.name, (bundle.node, []))[1].append(f"draft {number}: {bundle.describe()}")
        return [(node, tuple(lines)) for node, lines in seats.values()]

    def left(self, nodes: Iterable[Node]) -> list[Node]:
        """What every node still has."""
        cores, gpus = _in_use(self.bundles)
        return [replace(n, cpus=n.cpus - cores[n.name], gpus=n.gpus - gpus[n.name]) for n in nodes]


def place(config: JobConfig, nodes: Sequence[Node]) -> Placement:
    """All replicas and draft workers of a job on empty nodes.

    ConfigError, with the arithmetic, where the nodes do not suffice.
    """
    if not nodes:
        raise ConfigError("decoding.placement: the cluster has no nodes")
    together, apart = _Rules.of(config, separate=False), _Rules.of(config, separate=True)
    wanted = config.decoding.placement
    if wanted != "auto":
        return _place(config, apart if wanted == "separate" else together, nodes)
    if _ranks(config):
        return _place(config, apart, nodes)
    if not apart.workers or len(nodes) == 1:
        return _place(config, together, nodes)
    try:
        placement = _place(config, apart, nodes)
    except ConfigError as refusal:
        try:
            return _place(config, together, nodes)
        except ConfigError:
            raise refusal from None
    homes = {each.node.name for each in placement.replicas}
    if all(draft.node.name not in homes for draft in placement.drafts):
        return placement
    try:  # one process spares the messages between neighbours
        return _place(config, together, nodes)
    except ConfigError:
        return placement


def place_replica(
    config: JobConfig, nodes: Sequence[Node], taken: Sequence[Bundle], separate: bool
) -> ReplicaPlacement | None:
    """One more replica beside those who hold `taken`; None where there is no room for it."""
    rules = replace(_Rules.of(config, separate), taken=tuple(taken))
    found = _search(rules, nodes, 1, 0)
    return None if found is None else found.replicas[0]


def place_draft(config: JobConfig, nodes: Sequence[Node], taken: Sequence[Bundle]) -> Bundle | None:
    """One more draft worker beside those who hold `taken`; None where there is no room for it."""
    rules = replace(_Rules.of(config, separate=True), taken=tuple(taken))
    found = _search(rules, nodes, 0, 1)
    return None if found is None else found.drafts[0]


def demand(config: JobConfig) -> list[tuple[Bundle, ...]]:
    """The least that a job needs, for nodes that are not there yet: one tuple for each group that is to be on one node.

    Targets come first. A GPU's worker asks for no core, since nobody knows how many there will be. ConfigError for
    what no cluster can offer.
    """
    if config.decoding.placement == "colocated":
        _refuse_ranks_in_one_process(config)
    target, decoding = config.target, config.decoding
    apart = decoding.placement == "separate" or (decoding.placement == "auto" and bool(_ranks(config)))
    rules, unknown = _Rules.of(config, separate=apart), Node("to come", 0)
    least = rules.threads or 1
    gpus = (1,) * rules.gpus if apart else (rules.gpus,)
    ranks = tuple(Bundle(unknown, 0 if n else least, n, rules.choice) for n in gpus or (0,))
    groups = [ranks] * (1 if target.replicas == "auto" else target.replicas)
    if rules.draft is not None:
        worker = Bundle(unknown, 0 if rules.draft.gpus else least, rules.draft.gpus, rules.draft_choice)
        groups += [(worker,)] * rules.workers
    return groups


# --- what fits on one node ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Split:
    """What the workers on a node get of its cores: each rank, each replica's own process, each draft worker."""

    rank: int
    replica: int
    draft: int


@dataclass(frozen=True, slots=True)
class _Rules:
    """What workers need, and how they share a node."""

    separate: bool
    gpus: int  # of a target, one for each rank; colocated: of the replica's process
    choices: tuple[Choice, ...]  # all must allow a target's node
    on_cores: bool  # the target, or a draft that lives with it, computes on the processor
    draft: DraftConfig | None  # workers of their own; None: there are none
    threads: int | None  # of whoever computes on the processor; None: as many as there are cores
    whole: bool = False  # nobody shares the cores of a node with a target that computes on them
    taken: tuple[Bundle, ...] = ()  # by others

    @classmethod
    def of(cls, config: JobConfig, separate: bool) -> _Rules:
        target, draft = config.target, drafting(config)
        models = draft if draft is not None and draft.kind == "model" else None
        choices = [Choice(target.accelerator, target.label_selector)]
        choices[0].check("target")
        if models is not None:
            theirs = Choice(models.accelerator, models.label_selector)
            theirs.check("draft")
            choices += [] if separate else [theirs]
        with_gpu = target.gpus if separate or models is None else max(target.gpus, models.gpus)
        on_cores = not target.gpus or not (separate or models is None or models.gpus)
        threads = None if target.threads == "auto" else target.threads
        return cls(separate, with_gpu, tuple(choices), on_cores, models if separate else None, threads)

    @property
    def workers(self) -> int:
        """Draft workers of the job."""
        return 0 if self.draft is None else self.draft.replicas

    @property
    def choice(self) -> Choice:
        """The nodes that all of `choices` allow."""
        return self.choices[0] if len(self.choices) == 1 else self.choices[0].together_with(self.choices[1])

    @property
    def draft_choice(self) -> Choice:
        return Choice() if self.draft is None else Choice(self.draft.accelerator, self.draft.label_selector)

    def split(self, node: Node, targets: int, drafts: int) -> _Split | None:
        """How so many targets and draft workers share a node; None where they do not fit."""
        draft_gpus = 0 if self.draft is None else self.draft.gpus
        if targets and not all(choice.allows(node) for choice in self.choices):
            return None
        if drafts and not self.draft_choice.allows(node):
            return None
        cores, gpus = _in_use(b for b in self.taken if b.node.name == node.name)
        if targets * self.gpus + drafts * draft_gpus > node.gpus - gpus[node.name]:
            return None
        one = 1 if node.cpus >= node.gpus else 0  # every worker on a GPU gets a core, or none does
        pure = (0 if self.on_cores else targets * self.gpus) + (drafts if draft_gpus else 0)
        free = node.cpus - cores[node.name] - pure * one
        if node.gpus and not self._gpu_workers_have_cores(node, pure * one) and not (self.on_cores and self.gpus):
            free -= 1  # a GPU node's last core is not for those who only compute on cores
        seekers = (targets if self.on_cores else 0) + (0 if draft_gpus else drafts)
        own = 1 if self.separate and self.gpus and free >= targets + seekers * (self.threads or 1) else 0
        free -= own * targets
        if free < 0 and seekers + own * targets + pure * one:
            return None
        if not seekers:
            return _Split(one, own, one)
        if self.whole and self.threads is None and targets and self.on_cores and not self.gpus and seekers > 1:
            return None
        each = self.threads or free // seekers
        if each == 0 or each * seekers > free:
            return None
        return _Split(each if self.on_cores else one, own, one if draft_gpus else each)

    def _gpu_workers_have_cores(self, node: Node, cores: int) -> bool:
        return cores > 0 or any(b.gpus and b.cores and b.node.name == node.name for b in self.taken)

    def room(self, node: Node, targets: int, drafts: int) -> int:
        """Draft workers, up to `drafts`, that fit beside so many targets; -1 where these do not fit."""
        if self.split(node, targets, 0) is None:
            return -1
        return next((d for d in range(drafts, 0, -1) if self.split(node, targets, d) is not None), 0)

    def seat(self, node: Node, targets: int, drafts: int) -> tuple[list[ReplicaPlacement], list[Bundle]]:
        """The bundles of those who share a node."""
        split = self.split(node, targets, drafts)
        assert split is not None, f"{targets} targets and {drafts} drafts on {node}"
        choice = self.choice
        if self.separate and self.gpus:
            ranks = (Bundle(node, split.rank, 1, choice),) * self.gpus
        else:
            ranks = (Bundle(node, split.rank, self.gpus, choice),)
        own = Bundle(node, split.replica, 0, choice) if split.replica else None
        draft = Bundle(node, split.draft, 0 if self.draft is None else self.draft.gpus, self.draft_choice)
        return [ReplicaPlacement(self.separate, ranks, own)] * targets, [draft] * drafts


def _in_use(bundles: Iterable[Bundle]) -> tuple[Counter[str], Counter[str]]:
    """(cores, GPUs) by the name of the node."""
    cores: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for bundle in bundles:
        cores[bundle.node.name] += bundle.cores
        gpus[bundle.node.name] += bundle.gpus
    return cores, gpus


# --- who goes where -----------------------------------------------------------------------------------------


def _ranks(config: JobConfig) -> str:
    """Which model takes several processes; empty where none does."""
    draft = drafting(config)
    drafts = draft.gpus if draft is not None and draft.kind == "model" else 0
    counts = {"target.gpus": config.target.gpus, "draft.gpus": drafts}
    return next((f"{key} asks for {count}" for key, count in counts.items() if count > 1), "")


def _refuse_ranks_in_one_process(config: JobConfig) -> None:
    several = _ranks(config)
    if several:
        raise ConfigError(
            f"decoding.placement: colocated is one process, and {several} ranks: choose separate or auto"
        )


def _place(config: JobConfig, rules: _Rules, nodes: Sequence[Node]) -> Placement:
    """A target that computes on the processor has its node's cores for itself, unless it does not work out so."""
    if not rules.separate:
        _refuse_ranks_in_one_process(config)
    asked = config.target.replicas
    wanted = None if asked == "auto" else asked
    whole = replace(rules, whole=True)
    found = _search(whole, nodes, wanted, rules.workers)
    if found is None:
        found = _search(rules, nodes, 1 if wanted is None else wanted, rules.workers)
    if found is None:
        raise _refusal(rules, nodes, wanted)
    return found


Filling = tuple[int, ...]  # targets on each node
Score = tuple[int, ...]  # the higher the better


def _search(rules: _Rules, nodes: Sequence[Node], wanted: int | None, drafts: int) -> Placement | None:
    """Seats for `wanted` replicas (None: as many as fit, at least one) and all draft workers, if there are."""
    best = _fillings(rules, nodes, drafts, wanted)
    enough = [total for total, (score, _) in best.items() if score[0] >= drafts and total >= (wanted or 0)]
    if not enough or (wanted is None and max(enough) == 0):
        return None
    filling = best[max(enough) if wanted is None else min(enough)][1]
    filling = _fewer(rules, nodes, filling, sum(filling) if wanted is None else wanted)
    shares = _share_out(rules, nodes, filling, drafts)
    replicas: list[ReplicaPlacement] = []
    workers: list[Bundle] = []
    for node, targets, here in zip(nodes, filling, shares, strict=True):
        if targets or here:
            seated = rules.seat(node, targets, here)
            replicas, workers = replicas + seated[0], workers + seated[1]
    replicas.sort(key=lambda each: -each.ranks[0].cores)  # the fastest first
    return Placement(tuple(replicas), tuple(workers))


def _fillings(rules: _Rules, nodes: Sequence[Node], drafts: int, most: int | None) -> dict[int, tuple[Score, Filling]]:
    """Number of targets → the best way to spread them: leaving room for drafts, not on the head, on many cores.

    Dynamic programming over the nodes. Of the ways to use one node only those are followed that no other way beats in
    both targets (up to `most`) and drafts.
    """
    best: dict[int, tuple[Score, Filling]] = {0: ((0, 0, 0), ())}
    for node in nodes:
        following: dict[int, tuple[Score, Filling]] = {}
        for targets, room in _ways(rules, node, drafts, most):
            for total, (score, filling) in best.items():
                gained = (
                    min(score[0] + room, drafts),
                    score[1] - (node.head and targets > 0),
                    score[2] + (node.cpus if targets else 0),
                )
                known = following.get(total + targets)
                if known is None or gained > known[0]:
                    following[total + targets] = (gained, (*filling, targets))
        best = following
    return best


def _ways(rules: _Rules, node: Node, drafts: int, most: int | None) -> list[tuple[int, int]]:
    """(targets, room for drafts beside them) on one node."""
    ways = [(0, rules.room(node, 0, drafts))]
    while (most is None or len(ways) <= most) and (room := rules.room(node, len(ways), drafts)) >= 0:
        ways.append((len(ways), room))
    return [way for i, way in enumerate(ways) if all(later[1] < way[1] for later in ways[i + 1 :])]


def _fewer(rules: _Rules, nodes: Sequence[Node], filling: Filling, wanted: int) -> Filling:
    """Take away targets beyond `wanted`: where drafts could have a node for themselves, and where cores are few."""
    kept = list(filling)
    divided = rules.on_cores and rules.threads is None
    able = [rules.workers and rules.room(node, 0, 1) for node in nodes]
    while sum(kept) > wanted:
        used = [i for i, targets in enumerate(kept) if targets]
        i = min(used, key=lambda i: (-able[i], not nodes[i].head, nodes[i].cpus / kept[i] if divided else kept[i], -i))
        kept[i] -= 1
    return tuple(kept)


def _share_out(rules: _Rules, nodes: Sequence[Node], filling: Filling, drafts: int) -> list[int]:
    """Draft workers on each node: one by one where there are fewest, on nodes without a target as long as possible."""
    shares = [0] * len(nodes)
    for _ in range(drafts):
        open_ = [i for i, n in enumerate(nodes) if rules.split(n, filling[i], shares[i] + 1) is not None]
        i = min(open_, key=lambda i: (filling[i] > 0, shares[i], nodes[i].head, nodes[i].gpus, -nodes[i].cpus))
        shares[i] += 1
    return shares


# --- why it does not work out -------------------------------------------------------------------------------


def _refusal(rules: _Rules, nodes: Sequence[Node], wanted: int | None) -> ConfigError:
    """The first thing that is missing, with the arithmetic."""
    if all(rules.split(node, 1, 0) is None for node in nodes):
        return _no_seat(rules, nodes, "target", rules.gpus, rules.choices)
    if rules.workers and all(rules.split(node, 0, 1) is None for node in nodes):
        assert rules.draft is not None
        return _no_seat(rules, nodes, "draft", rules.draft.gpus, (rules.draft_choice,))
    replicas = wanted or 1
    most = max(_fillings(rules, nodes, 0, None))
    each = f"{rules.gpus} {rules.choices[0].kind}" if rules.gpus else _cores(rules.threads or 1)
    if most < replicas:
        return ConfigError(
            f"target.replicas: {replicas} targets of {each} each are wanted, and the cluster has room for {most}: "
            f"set it to at most {most}, or to auto"
        )
    fillings = _fillings(rules, nodes, rules.workers, replicas)
    room = max(score[0] for total, (score, _) in fillings.items() if total >= replicas)
    assert rules.draft is not None
    gpus = rules.draft.gpus
    theirs = f"{gpus} {rules.draft_choice.kind}" if gpus else _cores(rules.threads or 1)
    workers = "1 draft worker" if rules.workers == 1 else f"{rules.workers} draft workers"
    beside = f"the target of {each}" if replicas == 1 else f"{replicas} targets of {each} each"
    fewer = f"set it to at most {room}" if room else "choose fewer GPUs or threads, or decoding.placement: colocated"
    return ConfigError(
        f"draft.replicas: {workers} of {theirs} beside {beside}: the cluster has room for {room or 'none'}; {fewer}"
    )


def _no_seat(rules: _Rules, nodes: Sequence[Node], section: str, gpus: int, choices: Sequence[Choice]) -> ConfigError:
    """No node of the cluster has room for even one of them."""
    allowed = list(nodes)
    for choice, whose in zip(choices, (section, "draft"), strict=False):
        if not any(choice.allows(node) for node in nodes):
            return choice.refusal(whose, nodes)
        allowed = [node for node in allowed if choice.allows(node)]
    who = "the target" if section == "target" else "a draft worker"
    if not allowed:
        return ConfigError(
            "decoding.placement: colocated puts target and draft on one node, and no node is allowed for both: "
            "choose separate, or the same nodes for both"
        )
    most = max(node.gpus for node in allowed)
    if gpus > most:
        what = f"{gpus} {choices[0].kind} on one node"
        return ConfigError(f"{section}.gpus: {who} needs {what}; the largest node has {most}: set it to at most {most}")
    kept = " beside the one that is left to its GPUs" if all(node.gpus for node in allowed) and not gpus else ""
    largest = max(node.cpus - (1 if kept else 0) for node in allowed)
    threads = rules.threads or 1
    return ConfigError(
        f"target.threads: {threads} threads need {_cores(threads)}, and the largest node has {largest}{kept}: "
        + (f"set it to at most {largest}, or to auto" if largest else "add a node with more")
    )


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"
