"""What fine-tuning a checkpoint takes where nothing else was asked for.

The options' own learning rates are for random weights, from which a model has far to go.
"""

from dataclasses import replace

from eke.config.compose import Composed, is_set
from eke.config.schema import Adapters, Config, Lora, Optimizer, PretrainedModel, Rows
from eke.plan.planner import Decision

FULL_LR = 5e-5
"""transformers' TrainingArguments.learning_rate."""

LORA_LR = 2e-4
"""Dettmers et al. 2023, arXiv:2305.14314, table 9: 7B and 13B."""

ADAPTER_LR = 3e-3
"""Liu et al. 2022, arXiv:2205.05638, 3.3: IA3."""

EPOCHS = 3.0
"""transformers' TrainingArguments.num_train_epochs."""


def fine_tuned(config: Config, composed: Composed) -> tuple[Config, tuple[Decision, ...], str]:
    """The configuration with the usual values of fine-tuning, each with its reason, and a warning.

    Args:
        config: as resolved; one with random weights is left as it is.
        composed: what was asked for: nothing that is set there is changed.
    """
    if not isinstance(config.model, PretrainedModel):
        return config, (), ""
    decisions, warning = [], ""
    if not is_set(composed, "optimizer.lr"):
        lr = _usual_lr(config)
        if lr is None:
            warning = (
                f"optimizer.lr = {config.optimizer.lr:g} is {config.optimizer.option}'s for random "
                "weights; fine-tuning usually takes less (optimizer.lr=...)"
            )
        else:
            config = replace(config, optimizer=replace(config.optimizer, lr=lr))
            kind = "fine-tuning" if not isinstance(config.peft, Adapters) else config.peft.option
            reason = f"usual for {kind} with model=pretrained; no optimizer.lr was set"
            decisions.append(Decision("optimizer.lr", f"{lr:g}", reason))
    open_end = config.train.epochs is None and config.train.steps is None
    if open_end and isinstance(config.data, Rows):
        config = replace(config, train=replace(config.train, epochs=EPOCHS))
        reason = "usual for fine-tuning; neither train.steps nor train.epochs was set"
        decisions.append(Decision("train.epochs", f"{EPOCHS:g}", reason))
    return config, tuple(decisions), warning


def _usual_lr(config: Config) -> float | None:
    """None for optimizers that read the rate in another way: their files have one of their own."""
    usual = FULL_LR
    if isinstance(config.peft, Adapters):
        usual = LORA_LR if isinstance(config.peft, Lora) else ADAPTER_LR
    return usual if config.optimizer.lr in (Optimizer().lr, usual) else None
