"""A plan, carried out on tensors of distinct numbers, gives each generation rank exactly the reference's parameters."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import SyncError
from megarl.types import Layout, Rank
from megarl.weights.families import model_family
from megarl.weights.plan import GenerationRank, RankShard, ReshardPlan, plan_reshard
from megarl.weights.regions import Copy, Region, as_slices, volume
from tests import examples
from tests.weights import reference


def vllm_copies(c: dict, tp: int, rank: int) -> tuple[Copy, ...]:
    """vLLM's copies of one rank, found by looking each row's first element up, runs of rows together: no box arithmetic."""
    hf = reference.hf_tensors(c)
    names, starts = list(hf), torch.tensor([float(tensor.flatten()[0]) for tensor in hf.values()])
    copies = []
    for target, held in reference.vllm(c, hf, tp, rank).items():
        first = held if held.ndim == 1 else held[:, 0].contiguous()
        owner = torch.searchsorted(starts, first, right=True) - 1
        runs: list[list] = []  # [tensor, row in it, column in it, row here, number of rows]
        for row, (number, which) in enumerate(zip(first.tolist(), owner.tolist(), strict=True)):
            if number == 0:
                continue
            width = 1 if held.ndim == 1 else hf[names[which]].shape[1]
            at, column = divmod(int(number) - int(starts[which]), width)
            if runs and runs[-1][:3] == [which, at - runs[-1][4], column]:
                runs[-1][4] += 1
            else:
                runs.append([which, at, column, row, 1])
        for which, at, column, row, count in runs:
            columns = () if held.ndim == 1 else (held.shape[1],)
            source = ((at, at + count), *((column, column + n) for n in columns))
            copies.append(Copy(Region(names[which], source), Region(target, ((row, row + count), *((0, n) for n in columns)))))
    return tuple(copies)


def training_side(c: dict, layout: Layout, devices: list[int]) -> tuple[list[RankShard], list[dict[str, torch.Tensor]]]:
    hf, family = reference.hf_tensors(c), model_family(c)
    places = [Rank(index, layout) for index in range(layout.world_size)]
    ranks = [RankShard(rank.index, devices[rank.index % len(devices)], family.shard(c, rank)) for rank in places]
    return ranks, [reference.megatron(c, hf, rank) for rank in places]


def carry_out(plan: ReshardPlan, rank: int, held: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    """Move the slices and count how often each element is written."""
    got = {name: torch.zeros_like(value) for name, value in expected.items()}
    writes = {name: torch.zeros_like(value) for name, value in expected.items()}
    for piece in plan.slices[rank]:
        got[piece.target.name][as_slices(piece.target.box)] = held[piece.source_rank][piece.source.name][as_slices(piece.source.box)]
        writes[piece.target.name][as_slices(piece.target.box)] += 1
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
        assert torch.equal(writes[name], (value != 0).to(value.dtype)), name


@settings(max_examples=examples(25), deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2]),
    generation_tp=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([4, 8]),
    tied=st.booleans(),
    model_type=st.sampled_from(["qwen2", "llama"]),
)
def test_each_element_arrives_exactly_once(
    *, tp: int, pp: int, data: int, generation_tp: int, groups: int, tied: bool, model_type: str
) -> None:
    c = reference.config(num_hidden_layers=2, num_key_value_heads=groups, tie_word_embeddings=tied, model_type=model_type)
    training, held = training_side(c, Layout(tensor=tp, pipeline=pp, data=data), devices=list(range(8)))
    generation = [GenerationRank(r, r, vllm_copies(c, generation_tp, r)) for r in range(generation_tp)]
    plan = plan_reshard(training, generation, bytes_per_element=2)
    assert ReshardPlan.from_json(plan.to_json()) == plan
    hf = reference.hf_tensors(c)
    for rank in generation:
        carry_out(plan, rank.rank, held, reference.vllm(c, hf, generation_tp, rank.rank))
        needed = 2 * sum(volume(copy.target.box) for copy in rank.copies)
        assert plan.bytes_received[rank.rank] + plan.bytes_local[rank.rank] == needed
    assert sum(plan.bytes_sent.values()) == sum(plan.bytes_received.values())


def test_key_value_heads_repeated_over_generation_ranks() -> None:
    c = reference.config(num_key_value_heads=2, num_hidden_layers=2)
    training, held = training_side(c, Layout(tensor=2), devices=[0])
    for rank in range(4):
        plan = plan_reshard(training, [GenerationRank(rank, 0, vllm_copies(c, 4, rank))], bytes_per_element=4)
        carry_out(plan, rank, held, reference.vllm(c, reference.hf_tensors(c), 4, rank))


def test_equal_layouts_on_the_same_devices_send_nothing() -> None:
    """Except what interleaves differently inside one device, nothing moves: HybridFlow's bound is zero here."""
    c = reference.config()
    training, _ = training_side(c, Layout(tensor=4, data=2), devices=list(range(8)))
    plan = plan_reshard(training, [GenerationRank(r, r, vllm_copies(c, 4, r)) for r in range(4)], bytes_per_element=4)
    assert sum(plan.bytes_sent.values()) == 0
    assert all(received == 0 for received in plan.bytes_received.values())
    assert {s.source_rank for slices in plan.slices.values() for s in slices} == {0, 1, 2, 3}


def test_replicas_share_the_sending() -> None:
    """Four replicas on other devices: no one sends more than the largest single tensor above an even share."""
    c = reference.config()
    training, _ = training_side(c, Layout(data=4), devices=[0, 1, 2, 3])
    plan = plan_reshard(training, [GenerationRank(0, "elsewhere", vllm_copies(c, 1, 0))], bytes_per_element=4)
    total = sum(plan.bytes_sent.values())
    assert total == plan.bytes_received[0] > 0
    assert max(plan.bytes_sent.values()) - min(plan.bytes_sent.values()) <= 4 * 20 * 4


def test_slices_are_maximal() -> None:
    """One key/value head a rank on both sides: each parameter is one slice, although it has several Hugging Face sources."""
    c = reference.config(tie_word_embeddings=True)
    training, _ = training_side(c, Layout(tensor=4), devices=[0])
    plan = plan_reshard(training, [GenerationRank(2, 0, vllm_copies(c, 4, 2))], bytes_per_element=4)
    layer = [s for s in plan.slices[2] if s.target.name == "model.layers.1.self_attn.qkv_proj.weight"]
    assert len(layer) == 1
    assert layer[0].source == Region("decoder.layers.1.self_attention.linear_qkv.weight", ((0, 12), (0, 20)))


def test_a_missing_training_rank_is_an_error() -> None:
    c = reference.config()
    training, _ = training_side(c, Layout(tensor=2), devices=[0])
    with pytest.raises(SyncError, match="no training rank holds"):
        plan_reshard(training[:1], [GenerationRank(0, 0, vllm_copies(c, 1, 0))], bytes_per_element=4)


def test_training_ranks_of_two_layouts_are_an_error() -> None:
    c = reference.config()
    mixed = training_side(c, Layout(tensor=2), devices=[0])[0] + training_side(c, Layout(tensor=4), devices=[0])[0]
    with pytest.raises(SyncError, match="in two ways"):
        plan_reshard(mixed, [GenerationRank(0, 0, vllm_copies(c, 1, 0))], bytes_per_element=4)


def test_a_32_layer_plan_takes_well_under_a_second() -> None:
    """Qwen2.5-7B's shape at 32 layers, TP4 x PP2 -> TP4; the generation side uses whole tensors of the training table as its layout."""
    c = reference.config(
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=152064,
        num_hidden_layers=32,
    )
    family, layout = model_family(c), Layout(tensor=4, pipeline=2)
    training = [RankShard(i, i, family.shard(c, Rank(i, layout))) for i in range(layout.world_size)]
    shards = [family.shard(c, Rank(i, Layout(tensor=4))) for i in range(4)]
    generation = [GenerationRank(i, i, tuple(copy for s in held.values() for copy in s.copies)) for i, held in enumerate(shards)]
    began = time.process_time()
    plan = plan_reshard(training, generation, bytes_per_element=2)
    assert time.process_time() - began < 1.0
    assert all(len(slices) < 32 * 10 for slices in plan.slices.values())
