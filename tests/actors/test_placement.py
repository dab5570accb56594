"""From job file and cluster to bundles."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.node import ACCELERATOR_LABEL, Choice, Node
from actors.placement import Bundle, Placement, ReplicaPlacement, demand, place, place_draft, place_replica
from pipeline.config import JobConfig
from pipeline.errors import ConfigError

NGRAM = {"kind": "ngram"}
MODEL = {"kind": "model", "model": "small"}


def job(draft: dict[str, Any] | None = None, placement: str = "auto", **target: Any) -> JobConfig:
    mapping = {
        "name": "placed",
        "input": {"path": "in", "text": "body"},
        "output": {"path": "out"},
        "target": {"model": "large", **target},
        "draft": draft,
        "decoding": {"placement": placement},
        "tasks": [{"name": "answer", "prompt": "{body}"}],
    }
    return JobConfig.model_validate(mapping)  # also what this version withholds


def on(*cpus: int, gpus: int = 0) -> list[Node]:
    return [Node(f"node-{i}", c, gpus) for i, c in enumerate(cpus)]


def gpu_nodes(kind: str, number: int, gpus: int, cpus: int, **labels: str) -> list[Node]:
    return [Node(f"{kind}-{i}", cpus, gpus, frozenset({kind}), labels) for i in range(number)]


HEAD = Node("head", 4, head=True)
ARCHIVE = [HEAD, *gpu_nodes("H100", 2, 8, 96), *gpu_nodes("L4", 4, 1, 8)]  # large targets, cheap drafts
ON_ARCHIVE = {**MODEL, "accelerator": "L4", "gpus": 1}


def seats(placement: Placement) -> tuple[list[str], list[str]]:
    """The nodes of the replicas, and those of the drafts."""
    return [each.node.name for each in placement.replicas], [bundle.node.name for bundle in placement.drafts]


def cores(placement: Placement) -> tuple[list[int], list[int]]:
    """Cores of the replicas' first ranks, and of the drafts."""
    return [each.ranks[0].cores for each in placement.replicas], [bundle.cores for bundle in placement.drafts]


class TestOneMachine:
    def test_it_is_colocated_on_all_its_cores(self) -> None:
        (laptop,) = on(6)
        for draft in (None, NGRAM, MODEL):
            placement = place(job(draft), [laptop])
            assert placement == Placement((ReplicaPlacement(False, (Bundle(laptop, 6),)),))

    def test_separate_workers_divide_its_cores(self) -> None:
        assert cores(place(job(MODEL, "separate"), on(5))) == ([2], [2])
        assert cores(place(job({**MODEL, "replicas": 2}, "separate"), on(6))) == ([2], [2, 2])
        assert cores(place(job(replicas=3), on(8))) == ([2, 2, 2], [])

    def test_what_computes_nothing_stays_with_the_replica(self) -> None:
        for draft in (None, NGRAM, {"kind": "none"}):
            placement = place(job(draft, "separate"), on(5))
            assert placement.separate
            assert cores(placement) == ([5], [])

    def test_a_core_of_a_node_with_gpus_is_left_to_them(self) -> None:
        assert cores(place(job(), on(8, gpus=1))) == ([7], [])
        assert cores(place(job(MODEL, "separate"), on(9, gpus=1))) == ([4], [4])
        with pytest.raises(ConfigError, match="largest node has 0 beside the one that is left to its GPUs"):
            place(job(), on(1, gpus=1))

    def test_a_gpu_target_takes_one_core_and_leaves_the_others_to_a_draft_on_the_processor(self) -> None:
        assert cores(place(job(gpus=1), on(8, gpus=1))) == ([1], [])
        assert cores(place(job(MODEL, gpus=1), on(8, gpus=1))) == ([8], [])
        placement = place(job(MODEL, "separate", gpus=1), on(8, gpus=1))
        assert cores(placement) == ([1], [6])
        assert placement.replicas[0].replica == Bundle(placement.replicas[0].node, 1)

    def test_more_gpus_than_cores_are_served_without_cores(self) -> None:
        placement = place(job(gpus=2), [Node("dense", 3, 4)])
        assert [len(each.ranks) for each in placement.replicas] == [2, 2]
        assert {bundle.cores for each in placement.replicas for bundle in each.ranks} == {0}
        assert {each.replica.cores for each in placement.replicas if each.replica} == {1}
        assert placement.replicas[0].ranks[0].threads == 1

    def test_every_gpu_holds_a_replica_of_its_own(self) -> None:
        assert len(place(job(gpus=1), on(16, gpus=8)).replicas) == 8
        assert cores(place(job(MODEL, gpus=1), on(16, gpus=4))) == ([4] * 4, [])
        assert [each.ranks[0].gpus for each in place(job({**MODEL, "gpus": 1}), on(16, gpus=2)).replicas] == [1, 1]


class TestSeveralNodes:
    def test_a_draft_model_goes_to_another_node_where_there_is_one(self) -> None:
        placement = place(job(MODEL), on(4, 8))
        assert seats(placement) == (["node-1"], ["node-0"])
        assert cores(placement) == ([8], [4])
        assert not place(job(NGRAM), on(4, 8)).separate
        assert not place(job(MODEL, "colocated"), on(4, 8)).separate

    def test_replicas_auto_is_one_on_every_node_the_fastest_first(self) -> None:
        assert cores(place(job(), on(4, 8, 2))) == ([8, 4, 2], [])
        assert cores(place(job(threads=3), on(4, 8, 2))) == ([3, 3, 3], [])
        assert cores(place(job(replicas=2), on(4, 8, 2))) == ([8, 4], [])

    def test_large_targets_and_cheap_drafts_each_have_their_machines(self) -> None:
        placement = place(job({**ON_ARCHIVE, "replicas": 4}, accelerator="H100", gpus=4), ARCHIVE)
        assert seats(placement) == (["H100-0", "H100-0", "H100-1", "H100-1"], [f"L4-{i}" for i in range(4)])
        assert all(len(each.ranks) == 4 for each in placement.replicas)
        left = {node.name: (node.cpus, node.gpus) for node in placement.left(ARCHIVE)}
        assert left == {"head": (4, 0), "H100-0": (86, 0), "H100-1": (86, 0)} | {f"L4-{i}": (7, 0) for i in range(4)}

    def test_labels_choose_nodes(self) -> None:
        nodes = [
            Node("a", 8, labels={"zone": "a", "disk": "ssd"}),
            Node("b", 8, labels={"zone": "b"}),
            Node("c", 16),
        ]
        assert seats(place(job(label_selector={"zone": "a"}), nodes))[0] == ["a"]
        assert seats(place(job(label_selector={"zone": "!a"}), nodes))[0] == ["c", "b"]
        assert sorted(seats(place(job(label_selector={"zone": "in(a, b)"}), nodes))[0]) == ["a", "b"]
        assert seats(place(job(label_selector={"zone": "!in(a,b)"}), nodes))[0] == ["c"]
        there = place(job({**MODEL, "label_selector": {"zone": "b"}}, label_selector={"disk": "ssd"}), nodes)
        assert seats(there) == (["a"], ["b"])

    def test_a_label_names_an_accelerator_as_well(self) -> None:
        nodes = [Node("x", 8, 2, frozenset({"A100"}), {ACCELERATOR_LABEL: "A100"}), Node("y", 8, 2)]
        assert seats(place(job(gpus=2, label_selector={ACCELERATOR_LABEL: "A100"}), nodes))[0] == ["x"]

    def test_drafts_live_beside_a_target_only_where_room_is_left(self) -> None:
        draft = {**MODEL, "gpus": 1, "replicas": 2}
        placement = place(job(draft, gpus=2), [Node("three", 8, 3), Node("four", 8, 4)])
        assert len(placement.replicas) == 2
        assert seats(place(job(draft, gpus=4, replicas=1), on(8, 8, gpus=8))) == (["node-0"], ["node-1"] * 2)

    def test_neighbours_are_one_process_unless_a_model_has_several_ranks(self) -> None:
        draft = {**MODEL, "gpus": 1, "accelerator": "H100"}
        nodes = [HEAD, *gpu_nodes("H100", 1, 4, 32)]
        assert not place(job(draft, gpus=1, accelerator="H100"), nodes).separate
        assert place(job(draft, gpus=2, accelerator="H100"), nodes).separate
        assert place(job(NGRAM, gpus=2, accelerator="H100"), nodes).separate
        divided = place(job({**draft, "gpus": 2}, gpus=1, replicas=1, accelerator="H100"), nodes)
        assert divided.separate
        assert [bundle.gpus for bundle in divided.drafts] == [2]

    def test_the_head_is_taken_last(self) -> None:
        nodes = [Node("head", 16, head=True), Node("a", 4), Node("b", 4)]
        assert sorted(seats(place(job(replicas=2), nodes))[0]) == ["a", "b"]
        assert seats(place(job({**MODEL, "replicas": 1}, threads=4, replicas=1), nodes))[1] != ["head"]

        both = [Node("head", 8, head=True), Node("a", 8)]
        assert seats(place(job(MODEL), both)) == (["a"], ["head"])

    def test_a_draft_has_a_node_for_itself_where_few_replicas_are_wanted(self) -> None:
        nodes = [*gpu_nodes("L4", 1, 8, 16), *gpu_nodes("H100", 1, 2, 16)]
        assert seats(place(job(ON_ARCHIVE, gpus=2, replicas=1), nodes)) == (["H100-0"], ["L4-0"])

    def test_an_arrangement_is_found_where_filling_nodes_up_fails(self) -> None:
        draft = {**MODEL, "gpus": 2, "replicas": 3}  # 7 = 3 + 2 + 2 and 5 = 3 + 2; but 7 = 3 + 3 leaves one draft out
        placement = place(job(draft, "separate", gpus=3, replicas=2), [Node("seven", 16, 7), Node("five", 16, 5)])
        assert seats(placement) == (["seven", "five"], ["seven", "seven", "five"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "nodes", "message"),
        [
            (job(), [], "decoding.placement: the cluster has no nodes"),
            (job(gpus=1), on(8, 8), "target.gpus: the target needs 1 GPU on one node; the largest node has 0: "
             "set it to at most 0"),
            (job(gpus=4, accelerator="H100"), [*gpu_nodes("H100", 3, 2, 8), *gpu_nodes("L4", 1, 8, 8)],
             "target.gpus: the target needs 4 H100 on one node; the largest node has 2: set it to at most 2"),
            (job(accelerator="B200"), ARCHIVE, "target.accelerator: no node has B200; the cluster has H100, L4"),
            (job(accelerator="B200"), on(4),
             "target.accelerator: no node has B200; the nodes name no accelerator type"),
            (job(label_selector={"zone": "b"}), gpu_nodes("L4", 1, 1, 4, zone="a"),
             "target.label_selector: no node has zone: b; there are nodes with zone: a"),
            (job(label_selector={"zone": "in(b"}), on(4),
             "target.label_selector: zone: 'in(b' is no condition; write value, !value, in(a,b) or !in(a,b)"),
            (job({**MODEL, "accelerator": "T4", "gpus": 1}, "separate"), ARCHIVE,
             "draft.accelerator: no node has T4; the cluster has H100, L4"),
            (job({**MODEL, "gpus": 2, "accelerator": "L4"}, "separate"), ARCHIVE,
             "draft.gpus: a draft worker needs 2 L4 on one node; the largest node has 1: set it to at most 1"),
            (job({**MODEL, "accelerator": "L4"}, "colocated", accelerator="H100", gpus=1), ARCHIVE,
             "decoding.placement: colocated puts target and draft on one node, and no node is allowed for both: "
             "choose separate, or the same nodes for both"),
            (job(None, "colocated", gpus=2), ARCHIVE, "decoding.placement: colocated is one process, and target.gpus "
             "asks for 2 ranks: choose separate or auto"),
            (job({**MODEL, "gpus": 2}, "colocated", gpus=1), on(8, gpus=4), "decoding.placement: colocated is one "
             "process, and draft.gpus asks for 2 ranks: choose separate or auto"),
            (job(gpus=4, replicas=5, accelerator="H100"), ARCHIVE, "target.replicas: 5 targets of 4 H100 each are "
             "wanted, and the cluster has room for 4: set it to at most 4, or to auto"),
            (job({**ON_ARCHIVE, "replicas": 6}, gpus=8, accelerator="H100"), ARCHIVE, "draft.replicas: 6 draft workers "
             "of 1 L4 beside the target of 8 H100: the cluster has room for 4; set it to at most 4"),
            (job({**MODEL, "gpus": 1}, "separate", gpus=1), on(8, gpus=1), "draft.replicas: 1 draft worker of 1 GPU "
             "beside the target of 1 GPU: the cluster has room for none; choose fewer GPUs or threads, or "
             "decoding.placement: colocated"),
            (job(threads=3), on(1, 2), "target.threads: 3 threads need 3 cores, and the largest node has 2: "
             "set it to at most 2, or to auto"),
            (job(threads=8), on(8, gpus=1), "target.threads: 8 threads need 8 cores, and the largest node has 7 beside "
             "the one that is left to its GPUs: set it to at most 7, or to auto"),
            (job(MODEL, "separate", threads=2), on(2), "draft.replicas: 1 draft worker of 2 cores beside the target of "
             "2 cores: the cluster has room for none; choose fewer GPUs or threads, or decoding.placement: colocated"),
            (job(replicas=3), on(1, 1), "target.replicas: 3 targets of 1 core each are wanted, and the cluster has "
             "room for 2: set it to at most 2, or to auto"),
        ],
    )  # fmt: skip
    def test_they_have_the_arithmetic(self, config: JobConfig, nodes: list[Node], message: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            place(config, nodes)
        assert str(refusal.value) == message

    def test_auto_is_colocated_where_separate_has_no_room(self) -> None:
        nodes = [Node("a", 8, 1), Node("b", 0)]
        assert not place(job({**MODEL, "gpus": 1}, gpus=1), nodes).separate

    def test_a_thousand_gpus_are_placed_at_once(self) -> None:
        nodes = gpu_nodes("H100", 125, 8, 96)
        placement = place(job({**MODEL, "gpus": 1, "replicas": 60}, "separate", gpus=2), nodes)
        assert len(placement.replicas) == (1000 - 60) // 2


class TestOneMore:
    def test_a_replica_finds_what_others_left(self) -> None:
        config = job({**ON_ARCHIVE, "replicas": 2}, gpus=4, replicas=3, accelerator="H100")
        placement = place(config, ARCHIVE)
        more = place_replica(config, ARCHIVE, placement.bundles, separate=True)
        assert more is not None
        assert Counter(seats(placement)[0] + [more.node.name]) == {"H100-0": 2, "H100-1": 2}
        assert place_replica(config, ARCHIVE, placement.bundles + more.bundles, separate=True) is None

    def test_a_draft_worker_finds_another_node(self) -> None:
        config = job({**ON_ARCHIVE, "replicas": 2}, gpus=8, accelerator="H100")
        placement = place(config, ARCHIVE)
        alive = [node for node in ARCHIVE if node.name != placement.drafts[0].node.name]
        more = place_draft(config, alive, placement.bundles)
        assert more is not None
        assert more.node.name not in {bundle.node.name for bundle in placement.drafts}

    def test_one_node_less_is_noticed(self) -> None:
        config = job()
        placement = place(config, on(4, 4))
        assert place_replica(config, on(4), placement.bundles, separate=False) is None
        assert place_replica(config, on(4, 4), placement.replicas[1].bundles, separate=False) is not None


def test_the_least_that_is_needed_is_known_before_there_are_nodes() -> None:
    asked = demand(job({**ON_ARCHIVE, "replicas": 2}, gpus=2, replicas=2, accelerator="H100"))
    assert [[(b.cores, b.gpus, b.choice.accelerator) for b in group] for group in asked] == [
        [(0, 1, "H100")] * 2, [(0, 1, "H100")] * 2, [(0, 1, "L4")], [(0, 1, "L4")],
    ]  # fmt: skip
    assert [[(b.cores, b.gpus) for b in group] for group in demand(job(threads=3))] == [[(3, 0)]]


def test_a_placement_describes_itself() -> None:
    assert place(job(MODEL, "separate"), on(3)).describe() == "Ray, separate: target 1 core, draft 1 core"
    assert place(job(gpus=1), on(3, gpus=1)).describe() == "Ray, colocated, 1 core and 1 GPU"
    assert place(job(gpus=2), on(8, gpus=4)).describe() == "Ray, 2 replicas, separate: target 2 × (1 core and 1 GPU)"
    assert place(job({**MODEL, "gpus": 1}, gpus=2), on(8, gpus=3)).by_node()[0][1] == (
        "target 0: 2 × (1 core and 1 GPU)",
        "replica 0: 1 core",
        "draft 0: 1 core and 1 GPU",
    )


# --- what holds on any cluster ------------------------------------------------------------------------------

KINDS = ("H100", "L4")
ZONES = ("a", "b")


@st.composite
def clusters(draw: st.DrawFn, most: int = 5) -> list[Node]:
    nodes = []
    for i in range(draw(st.integers(1, most))):
        gpus = draw(st.sampled_from((0, 0, 1, 2, 3, 5, 8)))
        kinds = frozenset({draw(st.sampled_from(KINDS))} if gpus else ())
        labels = {"zone": draw(st.sampled_from(ZONES))} if draw(st.booleans()) else {}
        nodes.append(Node(f"n{i}", draw(st.integers(0, 9)), gpus, kinds, labels, head=i == 0))
    return nodes


def choosers() -> st.SearchStrategy[dict[str, Any]]:
    conditions = st.sampled_from(("a", "b", "!a", "in(a,b)"))
    return st.one_of(
        st.just({}),
        st.builds(lambda kind: {"accelerator": kind}, st.sampled_from(KINDS)),
        st.builds(lambda zone: {"label_selector": {"zone": zone}}, conditions),
    )


@st.composite
def jobs(draw: st.DrawFn) -> JobConfig:
    target = {"gpus": draw(st.sampled_from((0, 0, 1, 2, 4))), **draw(choosers())}
    target["replicas"] = draw(st.sampled_from(("auto", 1, 2, 3)))
    target["threads"] = draw(st.sampled_from(("auto", 1, 2)))
    draft: dict[str, Any] | None = draw(st.sampled_from((None, NGRAM, MODEL)))
    if draft is MODEL:
        draft = {**MODEL, "gpus": draw(st.integers(0, 2)), "replicas": draw(st.integers(1, 3)), **draw(choosers())}
    return job(draft, draw(st.sampled_from(("auto", "colocated", "separate"))), **target)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(jobs(), clusters())
def test_no_node_gives_more_than_it_has(config: JobConfig, nodes: list[Node]) -> None:
    try:
        placement = place(config, nodes)
    except ConfigError:
        return
    wanted, draft = config.target, config.draft[0] if config.draft else None
    assert len(placement.replicas) == wanted.replicas or (wanted.replicas == "auto" and placement.replicas)
    models = draft is not None and draft.kind == "model"
    assert len(placement.drafts) == (draft.replicas if draft is not None and models and placement.separate else 0)
    choice = Choice(wanted.accelerator, wanted.label_selector)
    for each in placement.replicas:
        assert {bundle.node.name for bundle in each.bundles} == {each.node.name}, "one node for all ranks"
        assert choice.allows(each.node)
        if placement.separate and wanted.gpus:
            assert [bundle.gpus for bundle in each.ranks] == [1] * wanted.gpus
    for bundle in placement.drafts:
        assert draft is not None
        assert Choice(draft.accelerator, draft.label_selector).allows(bundle.node)
        assert bundle.gpus == draft.gpus
    for node in placement.left(nodes):
        assert node.gpus >= 0, node
        assert node.cpus >= 0, node
        with_gpu = any(bundle.gpus and bundle.cores for bundle in placement.bundles if bundle.node.name == node.name)
        alone = [bundle for bundle in placement.bundles if bundle.node.name == node.name and not bundle.gpus]
        if alone and next(n for n in nodes if n.name == node.name).gpus:
            assert node.cpus >= 1 or with_gpu, "the last core of a GPU node"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from(("auto", 1, 2, 3)),
)  # fmt: skip
def test_a_way_is_found_if_there_is_one(
    gpus: list[int], ranks: int, draft_gpus: int, drafts: int, replicas: int | str
) -> None:
    def room(counts: tuple[int, ...]) -> int:
        return sum((have - ranks * targets) // draft_gpus for have, targets in zip(gpus, counts, strict=True))

    ways = product(*(range(have // ranks + 1) for have in gpus))
    possible = {sum(way) for way in ways if room(way) >= drafts} - {0}
    nodes = [Node(f"n{i}", 64, have) for i, have in enumerate(gpus)]
    draft = {**MODEL, "gpus": draft_gpus, "replicas": drafts}
    config = job(draft, "separate", gpus=ranks, replicas=replicas)
    if not possible or (replicas != "auto" and replicas > max(possible)):  # type: ignore[operator]
        with pytest.raises(ConfigError):
            place(config, nodes)
    else:
        assert len(place(config, nodes).replicas) == (max(possible) if replicas == "auto" else replicas)


def test_what_no_cluster_can_offer_is_not_waited_for() -> None:
    with pytest.raises(ConfigError, match=r"colocated is one process, and target\.gpus asks for 8 ranks"):
        demand(job(gpus=8, placement="colocated"))
