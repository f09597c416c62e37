"""Steps on conversations: beside TRL's SFTTrainer, packed, and with an end of turn that pads.

Beside SFTTrainer with `assistant_only_loss`, both sides have the same weights, rows, order and
micro-batches, and a template of TRL's that marks what the assistant generates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import FAMILIES, conversations, saved
from prepared import write_jsonl
from support import TINY, last_wins
from torch import Tensor, nn
from trained import start_job

from eke.training.batches.batches import MicroBatch
from eke.training.batches.dataset import TrainingData, build_data
from eke.training.model.attention_kernels import spare_mask_checks
from eke.training.model.build_model import build_model
from eke.training.model.loss import build_loss

BOUND = 1e-6
STEPS = 2
LENGTH = 1280
KINDS = {
    # name: the family whose special tokens the tokenizer has, what the conversations have
    "llama3": ("llama 3.1", ("system",)),
    "qwen2_5": ("qwen 2.5", ("system", "tools")),
    "qwen3": ("qwen 3", ("system", "tagged", "tools")),
    "gemma": ("gemma", ()),
    "phi3": ("phi 3", ("system",)),
    "deepseekv3": ("deepseek", ("system", "tagged")),
    "gptoss": ("harmony", ("system", "thinking")),
}
"""Templates that TRL ships as `NAME_training.jinja`."""

SHORT = (
    "model=tiny",
    *TINY,
    "model.vocab_size=400",
    "data=chat",
    f"data.seq_len={LENGTH}",
    "data.num_eval_samples=2",
    "batch.per_device=2",
    "batch.accumulation=2",
    f"train.steps={STEPS}",
)


pytestmark = pytest.mark.usefixtures("prepared_here")


@pytest.fixture(autouse=True)
def unpacked_again():
    """Other tests of this process have one sequence per row."""
    yield
    spare_mask_checks(nn.Identity(), packed=False)


@dataclass(frozen=True)
class Taken:
    """What one optimizer step begins with."""

    loss: float
    gradients: dict[str, Tensor]

    def differs_from(self, other: "Taken") -> float:
        """Largest difference in the loss, or in an element of the gradient, to its norm."""
        norm = torch.cat([each.flatten() for each in other.gradients.values()]).norm().item()
        assert self.gradients.keys() == other.gradients.keys()
        elements = [
            (mine - other.gradients[name]).abs().max().item() / norm
            for name, mine in self.gradients.items()
        ]
        return max(abs(self.loss / other.loss - 1), *elements)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def taken_by_eke(plan: Any, model: nn.Module, cut: list[MicroBatch]) -> Taken:
    """Loss and gradients of one step, as eke takes them."""
    loss_of, total = build_loss(plan), 0.0
    num_targets = sum(batch.num_targets for batch in cut)
    model.zero_grad()
    for batch in cut:
        loss = loss_of(model, batch) / num_targets
        loss.backward()
        total += loss.item()
    return Taken(total, gradients_of(model))


def taken_by_trl(
    model: nn.Module, tokenizer: Any, rows: list[dict[str, Any]], folder: Path
) -> list[Taken]:
    """Loss and gradients of each step of SFTTrainer, at a learning rate of zero."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    steps: list[Taken] = []
    losses: list[float] = []

    class Listening(SFTTrainer):
        def training_step(self, *args: Any, **named: Any) -> Tensor:
            loss = super().training_step(*args, **named)
            losses.append(loss.item())
            return loss

    class Keeps(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **_: Any) -> None:
            steps.append(Taken(sum(losses), gradients_of(model)))
            losses.clear()

    arguments = SFTConfig(
        str(folder),
        assistant_only_loss=True,
        max_length=LENGTH,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        learning_rate=0.0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        optim="sgd",
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Listening(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Keeps()],
    )
    trainer.train()
    return steps


def in_order(data: TrainingData, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the first steps, in eke's order."""
    order = data.order().steps(0, STEPS)
    return [rows[data.train.source.chosen[number]] for keys in order for _, number in keys]


def typed_for(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> tuple[str, ...]:
    """A command that trains on the rows with the tokenizer in the folder."""
    path = write_jsonl(folder / "rows.jsonl", rows)
    tokenizer = f"data.tokenizer={folder / 'tokenizer'}"
    return last_wins(*SHORT, f"data.path={path}", tokenizer, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_step_matches_trl(kind, make_plan, tmp_path) -> None:
    trl = pytest.importorskip("trl", reason="an extra of the tests")
    family, has = KINDS[kind]
    template = Path(trl.__file__).parent / "chat_templates" / f"{kind}_training.jinja"
    tokenizer = saved(FAMILIES[family], tmp_path / "tokenizer")
    rows = conversations(has)
    plan = make_plan(*typed_for(tmp_path, rows, f"data.chat_template={template}"))
    model = build_model(plan, torch.device("cpu"))
    data = build_data(plan)
    mine = [taken_by_eke(plan, model, cut) for cut in data.train_steps(0)]
    model.zero_grad()
    tokenizer.chat_template = template.read_text()
    theirs = taken_by_trl(model, tokenizer, in_order(data, rows), tmp_path / "trl")
    assert len(mine) == len(theirs) == STEPS
    assert max(a.differs_from(b) for a, b in zip(mine, theirs, strict=True)) < BOUND


@pytest.mark.parametrize("other", ["all", "last_assistant"])
def test_different_tokens_are_detected(other, make_plan, tmp_path) -> None:
    saved(FAMILIES["qwen 2.5"], tmp_path / "tokenizer")
    rows = conversations(("system", "tools"))
    steps = []
    for chosen in ("assistant", other):
        plan = make_plan(*typed_for(tmp_path, rows, f"data.train_on={chosen}"))
        model = build_model(plan, torch.device("cpu"))
        steps.append(taken_by_eke(plan, model, next(build_data(plan).train_steps(0))))
    assert steps[0].differs_from(steps[1]) > 1000 * BOUND


def epoch_of(job: Any) -> tuple[Taken, int]:
    """Loss and gradients of all conversations as one step, and the number of its trained tokens."""
    plan, data = job.plan, job.data
    num_steps = -(-len(data.train) // plan.batch.samples_per_step)
    every = list(data.train_steps(0))[:num_steps]
    batches = [batch for cut in every for batch in cut]
    found = taken_by_eke(plan, job.model, batches)
    return found, sum(batch.num_targets for batch in batches)


SHARED = {
    "packed": ("data.packing=on",),
    "padding-free": ("data.packing=padding_free",),
    "grouped": ("data.length_grouping=true",),
    "packed, one row": ("data.packing=on", "batch.per_device=1", "batch.accumulation=1"),
    "to a multiple": ("data.pad_to_multiple_of=64",),
    "sparse": ("kernels=sparse_prediction",),
    "fused": ("kernels.fused_linear_cross_entropy=true",),
}


@pytest.fixture(scope="module")
def plain_epoch() -> list[tuple[Taken, int]]:
    """What the first test that needs it has put there."""
    return []


@pytest.mark.parametrize("name", SHARED)
def test_row_layout_does_not_change_an_epoch(name, make_plan, tmp_path, plain_epoch) -> None:
    saved(FAMILIES["llama 3.1"], tmp_path / "tokenizer")
    typed = typed_for(tmp_path, conversations(("system",), count=40), "train.steps=16")
    if not plain_epoch:
        plain_epoch.append(epoch_of(start_job(make_plan(*typed), tmp_path / "plain")))
    job = start_job(make_plan(*last_wins(*typed, *SHARED[name])), tmp_path / "run")
    taken, num_targets = epoch_of(job)
    shares = any("packing" in typed for typed in SHARED[name])
    assert ((job.data.sequences_per_row or 1) > 1) is shares
    assert num_targets == plain_epoch[0][1] > 0
    assert plain_epoch[0][0].differs_from(taken) < BOUND


@pytest.mark.parametrize(
    ("pads", "packing"), [(None, "off"), ("<|im_end|>", "off"), (None, "padding_free")]
)
def test_end_of_turn_used_as_padding_is_trained(pads, packing, make_plan, tmp_path) -> None:
    tokenizer = saved(FAMILIES["chatml"], tmp_path / "tokenizer", pad_token=pads)
    rows = conversations(("system",))
    plan = make_plan(*typed_for(tmp_path, rows, "train.steps=16", f"data.packing={packing}"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert plan.vocabulary.pad == end
    data = build_data(plan)
    order = [number for keys in data.order().steps(0, 3) for _, number in keys]
    assert len(order) == len(data.train), "an epoch"
    answers = sum(
        message["role"] == "assistant"
        for number in order
        for message in rows[data.train.source.chosen[number]]["messages"]
    )
    batches = [batch for cut in list(data.train_steps(0))[:3] for batch in cut]
    padded = sum(batch.num_positions - batch.num_tokens for batch in batches)
    assert (padded > 0) is (packing == "off")
    assert sum(int((batch.labels == end).sum()) for batch in batches) == answers
