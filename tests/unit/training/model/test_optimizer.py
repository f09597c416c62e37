"""Optimizers: what is decayed, which implementation, and which numbers reach it."""

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch import nn
from unit.models.sizes.configs import TINY_CASES
from unit.plan.cases import SYNTHETIC, decision, plan_of
from unit.training.model.plans import hand_plan

from eke.common.errors import RunError
from eke.hardware import DEVICES
from eke.models.families import Role
from eke.models.sizes import OPTIMIZER_REGISTRY, structure
from eke.training.model.build_model import build_model
from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.optimizer.update import parameter_groups, set_learning_rate

COMPILED = {"adamw_torchao_8bit", "adamw_torchao_4bit", "adamw_bf16_sr"}
"""Options whose first step compiles for many seconds."""

HERE = sorted(set(OPTIMIZER_REGISTRY) - COMPILED - {"adamw_apex_fused", "custom"})
"""Options that take a step on any CPU at once."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 2)
        self.frozen.requires_grad_(False)


def built(*overrides):
    return build_optimizer(plan_of(*SYNTHETIC, *overrides), Small())


def test_vectors_are_not_decayed_and_frozen_weights_excluded() -> None:
    model = Small()
    decayed, rest = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], decayed["role"]) == (0.1, "outer")
    assert (rest["weight_decay"], rest["role"]) == (0.0, "vector")
    assert [id(p) for p in decayed["params"]] == [id(model.linear.weight)]
    wanted = {id(model.linear.bias), id(model.norm.weight), id(model.norm.bias)}
    assert {id(p) for p in rest["params"]} == wanted


FAMILIES = {
    "bart": ("Seq2SeqLM", {}), "bert": ("MaskedLM", {}), "bloom": ("CausalLM", {}),
    "cohere": ("CausalLM", {"use_qk_norm": True}), "convbert": ("MaskedLM", {}),
    "deberta-v2": ("MaskedLM", {}), "funnel": ("MaskedLM", {}), "gpt2": ("CausalLM", {}),
    "gpt_oss": ("CausalLM", {}), "granitemoehybrid": ("CausalLM", {}), "jamba": ("CausalLM", {}),
    "llama": ("CausalLM", {}), "mamba": ("CausalLM", {}), "mamba2": ("CausalLM", {}),
    "mixtral": ("CausalLM", {}), "modernbert": ("MaskedLM", {}), "mpnet": ("MaskedLM", {}),
    "nemotron_h": ("CausalLM", {}), "opt": ("CausalLM", {}), "qwen3_next": ("CausalLM", {}),
    "recurrent_gemma": ("CausalLM", {}), "roberta-prelayernorm": ("MaskedLM", {}),
    "rwkv": ("CausalLM", {}), "t5": ("Seq2SeqLM", {}), "xlnet": ("CausalLM", {}),
    "zamba": ("CausalLM", {}),
}  # fmt: skip
"""transformers' name of an architecture -> task, and settings that its sizes need."""

PAGE = Path(__file__).parents[4] / "notes" / "optimizers.md"


def listed_differences(family) -> list[tuple[str, str]]:
    """Pattern of names and who decays them, of the page's table."""
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| (Trainer|eke) \|", PAGE.read_text(), re.M)
    return [(pattern, who) for pattern, kinds, who in rows if family in kinds.split(", ")]


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_groups_differ_from_trainer_as_documented(family) -> None:
    import transformers

    task, settings = FAMILIES[family]
    config = transformers.CONFIG_MAPPING[family](**settings)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model))
    mine = {id(p) for g in parameter_groups(model, 1.0) if g["weight_decay"] for p in g["params"]}
    listed = listed_differences(family)
    found = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (name in theirs) != (id(parameter) in mine):
            who = "Trainer" if name in theirs else "eke"
            found |= {(p, w) for p, w in listed if w == who and fnmatch(name, p)} or {(name, who)}
    assert found == set(listed)


class Shaped(nn.Module):
    """Names and shapes that no family above has."""

    def __init__(self) -> None:
        super().__init__()
        self.experts_bias = nn.Parameter(torch.zeros(2, 3))
        self.r_w_bias = nn.Parameter(torch.zeros(2, 3))
        self.HeadRMSNorm = type("HeadRMSNorm", (nn.Module,), {})()
        self.HeadRMSNorm.g = nn.Parameter(torch.ones(2, 3))
        self.clip = nn.Module()
        self.clip.scale = nn.Parameter(torch.ones(2, 3))
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(1, 3))})
        self.scale_of = nn.Parameter(torch.ones(1, 1, 3))
        self.input_norm = nn.Sequential(nn.Linear(3, 3, bias=False))
        self.relative_attention_bias = nn.Embedding(4, 2)
        self.biased = nn.Parameter(torch.zeros(2, 3))
        self.normal_weight = nn.Parameter(torch.zeros(2, 3))


def test_biases_and_gains_of_any_shape_are_not_decayed() -> None:
    model = Shaped()
    decayed = {
        id(p) for g in parameter_groups(model, 1.0) if g["weight_decay"] for p in g["params"]
    }
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == {
        "input_norm.0.weight", "relative_attention_bias.weight", "biased", "normal_weight",
    }  # fmt: skip


@pytest.mark.parametrize(("model", "task"), TINY_CASES, ids=lambda value: value)
def test_optimizer_roles_match_size_formulas(model, task) -> None:
    plan = hand_plan(f"model={model}", f"task={task}")
    network = build_model(plan, torch.device("meta"))
    found = Counter(
        (group["role"], tuple(p.shape))
        for group in parameter_groups(network, 0.1)
        for p in group["params"]
    )
    assert found == Counter((w.role.value, w.shape) for w in structure(plan.config).weights)
    assert {role for role, _ in found} >= {Role.hidden.value, Role.embedding.value}


NUMBERS = {
    "adamw": (
        {"beta1": 0.7, "beta2": 0.8, "eps": 1e-3},
        lambda o: [o.param_groups[0][k] for k in ("betas", "eps")] == [(0.7, 0.8), 1e-3],
    ),
    "adafactor": (
        {"clip_threshold": 2.0, "decay_rate": -0.5, "eps1": 1e-20},
        lambda o: [o.param_groups[0][k] for k in ("clip_threshold", "decay_rate", "relative_step")]
        == [2.0, -0.5, False] and o.param_groups[0]["eps"][0] == 1e-20,
    ),
    "adamw_8bit": ({"min_8bit_size": 5}, lambda o: o.args.min_8bit_size == 5),
    "lion": ({"beta1": 0.7, "beta2": 0.8}, lambda o: o.param_groups[0]["betas"] == (0.7, 0.8)),
    "lion_8bit": ({"min_8bit_size": 5}, lambda o: o.args.min_8bit_size == 5),
    "adamw_torchao_8bit": ({"block_size": 64}, lambda o: o.block_size == 64),
    "adamw_torchao_4bit": ({"block_size": 64}, lambda o: o.block_size == 64),
    "adamw_bf16_sr": ({}, lambda o: o.bf16_stochastic_round),
    "schedule_free": (
        {"beta1": 0.5, "average_power": 1, "lr_power": 3},
        lambda o: [o.param_groups[0][k] for k in ("betas", "r", "weight_lr_power", "train_mode")]
        == [(0.5, 0.999), 1, 3, True],
    ),
}  # fmt: skip
"""Option -> keys, and whether they have reached the optimizer."""


@pytest.mark.parametrize("option", NUMBERS)
def test_optimizer_receives_configured_values(option) -> None:
    keys, reached = NUMBERS[option]
    common = {"lr": 0.5, "weight_decay": 0.25}
    optimizer = built(
        f"optimizer={option}", *(f"optimizer.{k}={v}" for k, v in {**common, **keys}.items())
    )
    assert reached(optimizer)
    assert [float(g["lr"]) for g in optimizer.param_groups] == [0.5, 0.5]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]


@pytest.mark.parametrize("option", ["galore", "apollo"])
def test_projection_settings_apply_only_to_matrices_in_layers(option) -> None:
    plan = plan_of(
        *SYNTHETIC, f"optimizer={option}", "optimizer.rank=3", "optimizer.update_proj_gap=7",
        "optimizer.scale=0.5",
    )  # fmt: skip
    network = build_model(plan, torch.device("cpu"))
    groups = {g["role"]: g for g in build_optimizer(plan, network).param_groups}
    hidden = groups.pop("hidden")
    assert (hidden["rank"], hidden["update_proj_gap"], hidden["scale"]) == (3, 7, 0.5)
    assert groups
    assert not any("rank" in group for group in groups.values())


@pytest.mark.parametrize("option", ["galore", "apollo"])
def test_default_projection_rank_is_a_quarter_of_the_width(option) -> None:
    plan = plan_of(*SYNTHETIC, f"optimizer={option}", "model.hidden_size=64")
    assert decision(plan, "optimizer.rank") == ("16", "a quarter of model.hidden_size 64")
    optimizer = build_optimizer(plan, build_model(plan, torch.device("cpu")))
    assert {g["rank"] for g in optimizer.param_groups if "rank" in g} == {16}
    typed = plan_of(*SYNTHETIC, f"optimizer={option}", "model.hidden_size=64", "optimizer.rank=16")
    assert typed.run_id == plan.run_id, "asked for or decided, it is the same run"


@pytest.mark.parametrize("option", HERE)
def test_learning_rate_reaches_every_group(option) -> None:
    optimizer = built(f"optimizer={option}") if option != "muon" else whole("optimizer=muon")
    set_learning_rate(optimizer, 0.125)
    assert {float(group["lr"]) for group in optimizer.param_groups} == {0.125}


def test_tensor_learning_rate_is_updated_in_place() -> None:
    """torchao refuses any other: its compiled step has read the tensor."""
    optimizer = built("optimizer=adamw_torchao_8bit")
    before = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.125)
    assert all(a is g["lr"] for a, g in zip(before, optimizer.param_groups, strict=True))
    assert [t.item() for t in before] == [0.125, 0.125]


def test_muon_gets_layer_matrices_and_adamw_gets_other_weights() -> None:
    optimizer = whole("optimizer=muon", "optimizer.adamw_lr=2e-3", "optimizer.lr=1e-3")
    muon, adamw = optimizer.parts
    assert [g["role"] for g in muon.param_groups] == ["hidden"]
    assert {g["role"] for g in adamw.param_groups} == {"embedding", "vector"}
    set_learning_rate(optimizer, 0.5)
    assert muon.param_groups[0]["lr"] == 0.5
    assert {g["lr"] for g in adamw.param_groups} == {1.0}


def test_muon_without_matrices_is_rejected_with_a_fix() -> None:
    with pytest.raises(RunError, match="optimizer=adamw"):
        built("optimizer=muon")


def test_embeddings_of_8_bit_optimizers_have_32_bit_states_by_default() -> None:
    for option, keep, wanted in [
        ("adamw_8bit", "true", torch.float32),
        ("adamw_8bit", "false", torch.uint8),
        ("lion_8bit", "true", torch.float32),
    ]:
        optimizer = whole(f"optimizer={option}", f"optimizer.embeddings_32bit={keep}")
        table, hidden = (
            next(g["params"][0] for g in optimizer.param_groups if g["role"] == role)
            for role in ("embedding", "hidden")
        )
        for p in (table, hidden):
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.state[table]["state1"].dtype is wanted
        assert optimizer.state[hidden]["state1"].dtype is torch.uint8


def whole(*overrides):
    """The optimizer of a whole model."""
    plan = plan_of(*SYNTHETIC, *overrides)
    return build_optimizer(plan, build_model(plan, torch.device("cpu")))


@pytest.mark.parametrize(
    "option", [pytest.param(o, marks=pytest.mark.slow) for o in sorted(COMPILED)]
    + [o for o in HERE if o != "muon"],
)  # fmt: skip
def test_step_changes_exactly_the_trainable_parameters(option) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = build_optimizer(plan_of(*SYNTHETIC, f"optimizer={option}"), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.norm(model.linear(torch.randn(5, 4))).pow(3).sum().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not name.startswith("frozen")}


def test_adafactor_keeps_only_rows_and_columns() -> None:
    model = nn.Linear(64, 32, bias=False)
    optimizer = build_optimizer(plan_of(*SYNTHETIC, "optimizer=adafactor"), model)
    model(torch.randn(2, 64)).pow(2).sum().backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    numbers = sum(t.numel() for t in state.values() if isinstance(t, torch.Tensor) and t.dim())
    assert numbers == 64 + 32


# bitsandbytes 0.50 says so of pages on a CPU.
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_only_paged_states_are_synchronized(monkeypatch) -> None:
    """bitsandbytes waits for the GPU after each parameter, and once more for its pages."""
    from bitsandbytes import utils
    from bitsandbytes.optim import optimizer as stepping

    waited: list[torch.Tensor] = []
    monkeypatch.setattr(utils, "sync_gpu", waited.append)
    monkeypatch.setattr(stepping, "sync_gpu", utils.sync_gpu)
    counts = {}
    for option in ("adamw_8bit", "paged_adamw_8bit", "lion", "lion_8bit"):
        model = Small()
        # Pages are of a GPU; parameters as small as these have none of them.
        plan = plan_of(*SYNTHETIC, f"optimizer={option}", device=DEVICES["h200"])
        optimizer = build_optimizer(plan, model)
        model.linear(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        counts[option] = len(waited)
        waited.clear()
    assert counts == {"adamw_8bit": 0, "paged_adamw_8bit": 2 + 1, "lion": 0, "lion_8bit": 0}
