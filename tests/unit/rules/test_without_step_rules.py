"""Without the rules about optimizers, memory and compilation: what really goes wrong."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from trained import steps_of
from unit.rules.devices import H200
from unit.rules.without import exchanging, is_same, light_plan, trained
from unit.training.model.steps import make_inputs

from eke.training.loop.training_state import torch_device
from eke.training.model.build_model import build_model
from eke.training.model.number_formats import compile_model
from eke.training.optimizer.build_optimizer import build_optimizer

CPU = torch.device("cpu")
IN_BACKWARD = ("memory=optimizer_in_backward", "train.max_grad_norm=null")


@pytest.mark.parametrize("too_old", [True, False], ids=["Pascal", "Volta"])
def test_inductor_rejects_gpus_older_than_volta(too_old, monkeypatch) -> None:
    """Without triton for it; a Volta would go on to ask for triton itself."""
    from torch._inductor import scheduler
    from torch._inductor.exc import GPUTooOldForTriton, TritonMissing
    from torch._inductor.virtualized import V

    pascal, volta = (SimpleNamespace(major=n, minor=0, name="a GPU") for n in (6, 7))
    monkeypatch.setattr(scheduler, "has_triton", lambda: False)
    monkeypatch.setattr(scheduler, "get_scheduling_for_device", lambda kind: object)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: pascal if too_old else volta)
    graph = SimpleNamespace(add_device_info=lambda device: None)
    expected = GPUTooOldForTriton if too_old else TritonMissing
    with V.set_graph_handler(graph), pytest.raises(expected):
        scheduler.Scheduler.create_backend(SimpleNamespace(), torch.device("cuda", 0))


def test_inductor_requires_a_compiler_on_a_cpu() -> None:
    """It compiles the layers of compile=inductor and the steps of torchao."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    with pytest.raises(InvalidCxxCompiler):
        cpp_builder.cpp_compiler_search(("no-such-compiler",))


def test_cuda_graphs_are_skipped_on_a_cpu() -> None:
    from torch._dynamo.backends.cudagraphs import check_for_skip

    traced = torch.fx.symbolic_trace(nn.ReLU())
    for node in traced.graph.nodes:
        node.meta["val"] = torch.ones(2)
    assert "cpu device" in check_for_skip(traced, 0)


def test_reduce_overhead_mode_only_adds_cuda_graphs() -> None:
    import torch._inductor

    assert torch._inductor.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    without, with_graphs = (
        torch._inductor.list_mode_options(f"max-autotune{more}") for more in ("-no-cudagraphs", "")
    )
    assert with_graphs == {**without, "triton.cudagraphs": True}


@pytest.mark.parametrize(
    ("pass_", "taken"), [("FORWARD", False), ("BACKWARD", True), ("INFERENCE", True)]
)
def test_cuda_graph_memory_is_overwritten_by_the_next_forward(pass_, taken) -> None:
    """The next call of a compiled module takes it, unless a forward pass waits for its backward.

    So a gradient left there is lost with the next micro-batch, and a layer's output, where there
    is no backward pass, with the next layer.
    """
    from torch._inductor.cudagraph_trees import CompilationMode, CUDAGraphTreeManager

    trees = mock.MagicMock(running_forwards_with_pending_backwards=False)
    trees.id_to_mode = {0: CompilationMode[pass_]}
    trees.in_new_torch_compile_invocation.return_value = True
    trees.user_invoked_mark_step.return_value = False
    CUDAGraphTreeManager.run(trees, [], 0)
    assert CUDAGraphTreeManager.can_start_new_generation(trees) is taken
    message = CUDAGraphTreeManager.format_dealloc_msg(None, is_grad_output=True)
    assert "gradient accumulation when a .grad tensor is allocated during" in message


def test_other_compilers_do_not_receive_the_mode(monkeypatch) -> None:
    told = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: told.append(how))
    for more in ((), ("compile.mode=max_autotune",)):
        compile_model(light_plan("compile=eager", *more), nn.ReLU())
    assert told == [{"backend": "eager"}] * 2


def test_stochastic_rounding_of_float32_equals_adamw(monkeypatch) -> None:
    """Step by step, without compiling it."""
    ends = {}
    for weights in (torch.float32, torch.bfloat16):
        for option in ("adamw", "adamw_bf16_sr"):
            torch.manual_seed(0)
            model = nn.Linear(64, 64).to(weights)
            optimizer = build_optimizer(light_plan(f"optimizer={option}"), model)
            with torch.compiler.set_stance("force_eager"):
                for _ in range(3):
                    model(torch.ones(1, 64, dtype=weights)).square().sum().backward()
                    optimizer.step()
            ends[weights, option] = model.weight.detach().float()
    for weights, same in ((torch.float32, True), (torch.bfloat16, False)):
        pair = (ends[weights, option] for option in ("adamw", "adamw_bf16_sr"))
        assert torch.allclose(*pair, rtol=1e-5, atol=1e-7) is same


def test_decaying_rate_slows_the_schedule_free_average() -> None:
    """On a bowl: after as many steps, the averaged weights are farther from its bottom."""
    from schedulefree import AdamWScheduleFree

    far = {}
    for name in ("constant", "linear"):
        weight = nn.Parameter(torch.tensor([3.0]))
        optimizer = AdamWScheduleFree([weight], lr=0.02, warmup_steps=0)
        optimizer.train()
        for step in range(200):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 - step / 200 if name == "linear" else 1)
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        far[name] = weight.abs().item()
    assert far["linear"] > 1.2 * far["constant"]


def test_optimizer_in_backward_does_not_clip(tmp_path) -> None:
    clipped = (*IN_BACKWARD[:1], "train.max_grad_norm=0.01")
    free = trained(tmp_path / "free", *IN_BACKWARD)
    asked = trained(tmp_path / "asked", *clipped)
    assert is_same(free, asked)
    plain = trained(tmp_path / "plain", *clipped[1:], "optimizer=sgd")
    within = trained(tmp_path / "within", *clipped, "optimizer=sgd")
    assert not is_same(plain, within)


def test_optimizer_in_backward_steps_every_micro_batch(tmp_path) -> None:
    cut = (
        "train.max_grad_norm=null",
        "optimizer=sgd",
        "batch.per_device=2",
        "batch.accumulation=2",
    )
    plain = trained(tmp_path / "plain", *cut)
    within = trained(tmp_path / "within", *cut, IN_BACKWARD[0])
    assert steps_of(plain)[1][0] == pytest.approx(steps_of(within)[1][0], rel=1e-2)
    assert steps_of(plain)[2] != pytest.approx(steps_of(within)[2], rel=1e-6)


def test_optimizer_in_backward_ignores_loss_scaling(tmp_path) -> None:
    scales = {}
    for more in ((), IN_BACKWARD[:1]):
        job = trained(tmp_path / str(len(more)), IN_BACKWARD[1], "precision=fp16", *more)
        scales[more] = job.formats.scaler.state_dict()["_growth_tracker"]
    assert scales == {(): 2, IN_BACKWARD[:1]: 0}, "steps that the scaler has seen"


def test_optimizer_in_backward_does_not_step_master_copies(tmp_path) -> None:
    typed = ("precision=bf16_pure", "precision.master=on", *IN_BACKWARD)
    with pytest.raises(KeyError, match="Parameter containing"):
        trained(tmp_path, *typed)


@pytest.mark.parametrize(("tied", "calls"), [("true", 2), ("false", 1)])
def test_tied_gradient_arrives_in_two_parts(tied, calls, tmp_path) -> None:
    copies = ("precision=bf16", "precision.casts=per_step")
    job = trained(tmp_path, "model=tiny", *copies, f"model.tie_word_embeddings={tied}")
    steps = []
    table = job.bare_model.get_input_embeddings().weight
    table.register_post_accumulate_grad_hook(steps.append)
    with job.formats.copies:
        job.bare_model(**make_inputs(job.bare_model)).logits.sum().backward()
    assert len(steps) == calls


def test_ddp_reduces_gradients_after_weight_hooks() -> None:
    order, model = [], nn.Linear(2, 2)
    with exchanging(model, lambda: order.append("exchange")) as shared:
        model.weight.register_post_accumulate_grad_hook(lambda _: order.append("step"))
        shared(torch.ones(1, 2)).sum().backward()
    assert order == ["step", "exchange"]


def most_gradients_of_a_call(loss: torch.Tensor) -> int:
    """Weights whose gradients one function of the backward pass returns, at most."""
    seen, open_nodes, most = set(), [loss.grad_fn], 0
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [function for function, _ in node.next_functions]
        most = max(most, sum(type(f).__name__ == "AccumulateGrad" for f in following))
        open_nodes += following
    return most


@pytest.mark.slow
def test_compiled_backward_returns_all_gradients_together() -> None:
    most = {}
    for option in ("none", "aot_eager"):
        plan = light_plan(f"compile={option}", "model.num_hidden_layers=1")
        model = build_model(plan, CPU)
        inputs, number = make_inputs(model), len(list(model.parameters()))
        most[option] = most_gradients_of_a_call(compile_model(plan, model)(**inputs).logits.sum())
    assert most == {"none": 1, "aot_eager": number}


def test_declared_gpu_is_not_this_machine(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = SimpleNamespace(device=H200)
    with pytest.raises(RuntimeError, match="has no GPU"):
        torch_device(plan)
