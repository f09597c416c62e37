"""Chat data gives the loss and the gradients of TRL's SFTTrainer with `assistant_only_loss`.

Both sides have the same weights, rows, order and micro-batches, and a template of TRL's that marks
what the assistant generates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import FAMILIES, saved
from prepared import write_jsonl
from support import TINY
from torch import Tensor, nn

import eke.data.sources.request as asking
from eke.data.preparation.rows import prepare_store
from eke.training.batches.batches import MicroBatch
from eke.training.batches.dataset import TrainingData, build_data
from eke.training.model.build_model import build_model
from eke.training.model.loss import build_loss

BOUND = 1e-6
STEPS = 3
KINDS = {
    # name: the family whose special tokens the tokenizer has, what the conversations have
    "llama3": ("llama 3.1", ("system",)),
    "qwen2_5": ("qwen 2.5", ("system", "tools")),
    "qwen3": ("qwen 3", ("system", "tagged")),
    "gemma": ("gemma", ()),
    "phi3": ("phi 3", ("system",)),
    "deepseek_r1_distill": ("deepseek", ("system", "tagged")),
    "deepseekv3": ("deepseek", ("system", "tagged")),
    "gptoss": ("harmony", ("system", "thinking")),
}
"""Templates that TRL ships as `NAME_training.jinja`."""

SHORT = (
    "model=tiny",
    *TINY,
    "model.vocab_size=400",
    "data=chat",
    "data.seq_len=768",
    "data.num_eval_samples=2",
    "batch.per_device=2",
    "batch.accumulation=2",
    f"train.steps={STEPS}",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    """Preparations happen in this process, into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(asking, "_prepare", prepare_store)


def conversations(has: tuple[str, ...], count: int = 13) -> list[dict[str, Any]]:
    """Rows of one to three exchanges; answers differ in length."""
    rows = []
    for number in range(count):
        messages: list[dict[str, Any]] = []
        if "system" in has and number % 2:
            messages.append({"role": "system", "content": f"you are bird {number}."})
        for turn in range(1 + number % 3):
            question = f"what is {number} plus {turn}?"
            answer = f"it is {number + turn}" + ", fine thanks\nfor the question" * (number % 4)
            if "tagged" in has and number % 2:
                answer = f"<think>\nso {turn} more\n</think>\n\n{answer}"
            said = {"role": "assistant", "content": answer}
            if "thinking" in has:
                said["thinking"] = f"the dog has {turn} more"
            messages += [{"role": "user", "content": question}, said]
        rows.append({"messages": messages})
    return rows


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
        max_length=768,
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
    order = data._order().steps(0, STEPS)
    return [rows[data.train.source.chosen[number]] for keys in order for _, number in keys]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_step_of_trl(kind, make_plan, tmp_path) -> None:
    trl = pytest.importorskip("trl", reason="an extra of the tests")
    family, has = KINDS[kind]
    template = Path(trl.__file__).parent / "chat_templates" / f"{kind}_training.jinja"
    tokenizer = saved(FAMILIES[family], tmp_path / "tokenizer")
    rows = conversations(has)
    plan = make_plan(
        *SHORT,
        f"data.path={write_jsonl(tmp_path / 'rows.jsonl', rows)}",
        f"data.tokenizer={tmp_path / 'tokenizer'}",
        f"data.chat_template={template}",
    )
    model = build_model(plan, torch.device("cpu"))
    data = build_data(plan)
    mine = [taken_by_eke(plan, model, cut) for cut in data.train_steps(0)]
    model.zero_grad()
    tokenizer.chat_template = template.read_text()
    theirs = taken_by_trl(model, tokenizer, in_order(data, rows), tmp_path / "trl")
    assert len(mine) == len(theirs) == STEPS
    assert max(a.differs_from(b) for a, b in zip(mine, theirs, strict=True)) < BOUND
