"""Loss-free balancing: hand-computed updates, what is counted and what is not, and a skewed router made even."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from engram.backbone import BackboneConfig, build
from engram.train.balance import BIAS, Balancer, routing_entropy

CFG = BackboneConfig(hidden_size=16, blocks=3, heads=2, ffn_width=24, experts=4, top_k=2, expert_width=8)
GATES = ("model.layers.1.mlp", "model.layers.2.mlp")
IDS_BT = torch.arange(24).view(2, 12) % 19


def _model() -> Any:
    return build(CFG, 19, 0).train()


def _bias(model: Any, layer: int = 1) -> torch.Tensor:
    return getattr(model.model.layers[layer].mlp.gate, BIAS)


def _force(model: Any, layer: int, experts_TK: list[list[int]]) -> Any:
    """Let the router of `layer` choose given experts, token by token (repeated to the batch's length)."""
    chosen_TK = torch.tensor(experts_TK)

    def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, indices, weights = args
        return hidden, chosen_TK.repeat(-(-len(indices) // len(chosen_TK)), 1)[: len(indices)], weights

    return model.model.layers[layer].mlp.experts.register_forward_pre_hook(hook, prepend=True)


def _run(model: Any, ids_BT: torch.Tensor = IDS_BT, **kwargs: Any) -> torch.Tensor:
    return model(input_ids=ids_BT, labels=ids_BT, use_cache=False, **kwargs).loss


def test_hand_computed_update() -> None:
    """8 tokens, top-2: loads 8, 4, 4, 0 of a mean of 4 -> the bias moves by -u, 0, 0, +u."""
    model = _model()
    balancer = Balancer(model, rate=0.25, alarm=0.7)
    _force(model, 1, [[0, 1], [0, 2]])
    _force(model, 2, [[0, 1], [2, 3]])
    _run(model, IDS_BT[:1, :8])
    assert balancer.loads()[GATES[0]].tolist() == [8, 4, 4, 0]
    metrics = balancer.update()
    assert _bias(model).tolist() == [-0.25, 0.0, 0.0, 0.25]
    assert _bias(model, 2).tolist() == [0.0] * 4
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)) / math.log(4)
    assert metrics["routing_entropy"] == pytest.approx((entropy + 1) / 2)
    assert metrics["max_load_ratio"] == 2.0 and metrics["counted"] == 32
    assert metrics["alarm"] is False
    assert balancer.loads()[GATES[0]].tolist() == [0] * 4


def test_a_mean_that_is_no_integer_keeps_exact_signs() -> None:
    """3 tokens, top-2, 4 experts: mean 1.5; loads 3, 1, 1, 1."""
    model = _model()
    balancer = Balancer(model, rate=1.0)
    _force(model, 1, [[0, 1], [0, 2], [0, 3]])
    _run(model, IDS_BT[:1, :3])
    balancer.update()
    assert _bias(model).tolist() == [-1.0, 1.0, 1.0, 1.0]


def test_entropy_by_hand() -> None:
    assert routing_entropy(torch.tensor([5, 5, 5, 5])) == pytest.approx(1.0)
    assert routing_entropy(torch.tensor([9, 0, 0, 0])) == 0.0
    assert routing_entropy(torch.tensor([1, 1, 0, 0])) == pytest.approx(0.5)
    assert routing_entropy(torch.tensor([0, 0])) == 0.0


def test_accumulation_counts_the_sum_and_evaluation_counts_nothing() -> None:
    whole, parts = _model(), _model()
    one, two = Balancer(whole), Balancer(parts)
    _run(whole)
    for row in range(2):
        _run(parts, IDS_BT[row : row + 1]).backward()
        parts.eval()
        with torch.no_grad():
            _run(parts)
        parts.train()
    for name in GATES:
        assert torch.equal(one.loads()[name], two.loads()[name])
        assert one.loads()[name].sum() == 24 * 2
    assert one.update() == two.update()
    assert torch.equal(_bias(whole), _bias(parts)) and _bias(whole).any()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted_twice(reentrant: bool) -> None:
    model = _model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    balancer = Balancer(model)
    calls = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    _run(model).backward()
    assert len(calls) == 2, "the block was not recomputed: the test shows nothing"
    assert balancer.loads()[GATES[0]].sum() == 24 * 2


def test_masked_positions_are_not_counted() -> None:
    model = _model()
    balancer = Balancer(model)
    mask_BT = torch.ones(2, 12, dtype=torch.long)
    mask_BT[1, :5] = 0
    _run(model, attention_mask=mask_BT)
    assert balancer.loads()[GATES[0]].sum() == 2 * 19
    balancer.update()
    model(IDS_BT, mask_BT, use_cache=False)
    assert balancer.loads()[GATES[0]].sum() == 2 * 19
    balancer.update()
    with balancer.masked(mask_BT.bool()):
        _run(model)
    assert balancer.loads()[GATES[0]].sum() == 2 * 19
    balancer.update()
    _run(model)
    assert balancer.loads()[GATES[0]].sum() == 2 * 24
    with balancer.masked(mask_BT[:, :4]), pytest.raises(ValueError, match=r"mask: \(2, 4\) has 8 positions"):
        _run(model)


def test_mask_selects_the_right_tokens() -> None:
    model = _model()
    balancer = Balancer(model)
    _force(model, 1, [[0, 1], [2, 3]])
    mask_BT = torch.tensor([[1, 0] * 6] * 2)
    with balancer.masked(mask_BT):
        _run(model)
    assert balancer.loads()[GATES[0]].tolist() == [12, 12, 0, 0]


def test_a_skewed_router_gets_even() -> None:
    """Biases that favour two experts of four: they take every token until 120 updates have made the load even."""
    model = _model()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.mul_(20.0)
        _bias(model).copy_(torch.tensor([1.5, 1.2, -1.2, -1.5]))
    balancer = Balancer(model, rate=0.02)
    ids_BT = torch.randint(0, 19, (8, 32), generator=torch.Generator().manual_seed(0))
    loads = []
    for _ in range(120):
        with torch.no_grad():
            _run(model, ids_BT)
        loads.append(balancer.loads()[GATES[0]].double())
        balancer.update()
    assert loads[0].tolist() == [256.0, 256.0, 0.0, 0.0]
    assert loads[-1].max() / loads[-1].mean() < 1.25
    assert routing_entropy(loads[0]) == pytest.approx(0.5) and routing_entropy(loads[-1]) > 0.98


def test_alarm_tells_of_a_dead_router() -> None:
    model = _model()
    balancer = Balancer(model, alarm=0.6)
    _force(model, 1, [[0, 1], [2, 3]])
    _force(model, 2, [[0, 1]])
    _run(model)
    metrics = balancer.update()
    assert metrics["alarm"] is True and metrics["max_load_ratio"] == 2.0
    assert metrics["min_routing_entropy"] == pytest.approx(0.5)
    assert metrics["routing_entropy"] == pytest.approx(0.75), "the mean alone would not have said it"


def test_bias_changes_the_choice_and_no_weight_or_gradient() -> None:
    model = _model()
    balancer = Balancer(model, rate=10.0)
    _run(model).backward()
    assert _bias(model).grad is None and not _bias(model).requires_grad
    before = balancer.loads()[GATES[0]]
    balancer.update()
    _run(model)
    after = balancer.loads()[GATES[0]]
    overloaded = before > before.double().mean()
    assert overloaded.any() and (after[overloaded] < before[overloaded]).all()


def test_bias_stays_fp32_and_in_the_state_dict() -> None:
    model = _model()
    balancer = Balancer(model, rate=0.001)
    for _ in range(3):
        _run(model)
        balancer.update()
    exact = _bias(model).clone()
    assert exact.any()
    assert torch.equal(model.state_dict()[f"{GATES[0]}.gate.{BIAS}"], exact)
    model.bfloat16()
    assert _bias(model).dtype == torch.bfloat16
    _run(model)
    assert _bias(model).dtype == torch.float32 and torch.equal(_bias(model), exact)
    balancer.update()
    assert model.state_dict()[f"{GATES[0]}.gate.{BIAS}"].dtype == torch.float32
    with torch.no_grad():
        _bias(model).fill_(0.5)  # as a loaded checkpoint does
    model.bfloat16()
    balancer.update()
    assert _bias(model).tolist() == [0.5] * 4, "nothing was counted, and loaded values must win over remembered ones"


def test_dense_models_are_left_alone() -> None:
    model = build(BackboneConfig(kind="dense", hidden_size=16, blocks=2, heads=2, ffn_width=24), 19, 0).train()
    balancer = Balancer(model)
    _run(model)
    assert balancer.update() == {} and balancer.loads() == {}
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_detach_removes_every_hook() -> None:
    model = _model()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = hooks()
    with Balancer(model) as balancer:
        assert hooks() > before
    assert hooks() == before
    _run(model)
    assert balancer.loads()[GATES[0]].sum() == 0
    metrics = balancer.update()
    assert metrics["counted"] == 0 and math.isnan(metrics["routing_entropy"]) and metrics["alarm"] is False
    assert not _bias(model).any()


def test_a_failed_forward_leaves_no_mask_behind() -> None:
    model = _model()
    balancer = Balancer(model)
    with pytest.raises(IndexError):
        _run(model, IDS_BT + 1000, attention_mask=torch.ones(2, 12, dtype=torch.long))
    assert balancer.mask_BT is None


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rate: -1"):
        Balancer(_model(), rate=-1)
    with pytest.raises(ValueError, match=r"alarm: 1\.5 must lie in 0\.\.1"):
        Balancer(_model(), alarm=1.5)


RANKS = """
import sys, torch, torch.distributed as dist
from engram.backbone import BackboneConfig, build
from engram.train.balance import Balancer
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = build(BackboneConfig(hidden_size=16, blocks=2, heads=2, ffn_width=24, experts=4, expert_width=8), 19, 0).train()
balancer = Balancer(model, rate=1.0)
ids = torch.arange(24).view(2, 12) % 19
model(input_ids=ids[rank : rank + 1], use_cache=False)
print(balancer.update()["counted"], model.model.layers[1].mlp.gate.e_score_correction_bias.tolist())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_sum_their_counts(tmp_path: Any) -> None:
    command = [sys.executable, "-c", RANKS]
    store = str(tmp_path / "store")
    ranks = [subprocess.Popen([*command, str(r), store], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    said = [process.communicate(timeout=120)[0].strip() for process in ranks]
    model = build(BackboneConfig(**{**CFG.to_dict(), "blocks": 2}), 19, 0).train()
    balancer = Balancer(model, rate=1.0)
    _run(model)
    assert said == [f"{balancer.update()['counted']} {_bias(model).tolist()}"] * 2
