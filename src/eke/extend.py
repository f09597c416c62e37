"""Interfaces of own code, each with its smallest example. No class needs to inherit from them.

A part is named by its import path: `model=custom model.target=net.Model model.args.width=64`. The
guide is docs/how-to/own-code.md.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

Batch: TypeAlias = Mapping[str, Any]
"""Tensors of a micro-batch by name. The first dimension of each tensor is the samples."""


class ModelPart(Protocol):
    """A class or function that returns an `nn.Module`.

    `forward` receives the keys of the batch that its signature has. Its output has logits (a
    tensor, `logits`, or the first item of a tuple), a loss (`loss`, or the only number in a tuple),
    or both.

        class Model(nn.Module):
            def __init__(self, width: int = 8):
                super().__init__()
                self.layer = nn.Linear(width, 1)

            def forward(self, x, y):
                return {"loss": (self.layer(x)[:, 0] - y).square().mean()}
    """

    def __call__(self, **args: Any) -> nn.Module:
        """Return the model. Random numbers come from the seed of the run."""


class DataPart(Protocol):
    """A class or function that returns a data set of torch.

    Samples are what torch's default collate function accepts, or `data.collate` names another
    function. Without a parameter `split`, the function is called with `data.args` for training, and
    with `data.args` and `data.eval_args` for evaluation.

        def data(split: str, rows: int = 16):
            generator = torch.Generator().manual_seed(int(split == "eval"))
            x = torch.randn(rows, 8, generator=generator)
            return [{"x": row, "y": row.sum()} for row in x]
    """

    def __call__(self, split: str, **args: Any) -> Any:
        """Return the data set, or (data set, collate function), of `train` or `eval`."""


class LossPart(Protocol):
    """A function of output and batch.

    A mean is multiplied by the number that `loss.per` counts: samples, the values of at least 0 of
    a key, or a function of the batch.

        def loss(output, batch, power: float = 2.0):
            return (output - batch["y"]).abs().pow(power).mean()
    """

    def __call__(self, output: Any, batch: Batch, **args: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the mean, float32 (), or (sum (), number)."""


class MetricPart(Protocol):
    """An object that sees every micro-batch of an evaluation in order, on rank 0.

    Metrics of torchmetrics, `compute_metrics(eval_pred)` of transformers, and functions of output
    and batch are accepted, too.

        class Metric:
            def reset(self):
                self.errors = []

            def update(self, output, batch):
                self.errors.append((output - batch["y"]).abs())

            def compute(self):
                return torch.cat(self.errors).mean().item()
    """

    def reset(self) -> None:
        """Begin an evaluation."""

    def update(self, output: Any, batch: Batch) -> None:
        """Add a micro-batch."""

    def compute(self) -> float | Mapping[str, float]:
        """Return a number, or numbers by name."""


class CallbackPart(Protocol):
    """An object with methods named like the events of transformers' TrainerCallback.

    Weights and random numbers must stay unchanged. `control` can stop, save and evaluate.

        class Callback:
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = state.global_step >= 5
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Run after an optimizer step. All other events have the same parameters."""


class OptimizerPart(Protocol):
    """A class or function of parameter groups that returns an optimizer of torch.

    Matrices are decayed by `optimizer.weight_decay`, vectors are not.

        def optimizer(groups, lr: float, momentum: float = 0.9):
            return torch.optim.SGD(groups, lr=lr, momentum=momentum)
    """

    def __call__(self, groups: list[dict[str, Any]], lr: float, **args: Any) -> Optimizer:
        """Return the optimizer."""


class SchedulePart(Protocol):
    """A function of the step, from 0, and the number of steps.

    Schedulers of torch keep state and are rejected.

        def schedule(step: int, total_steps: int):
            return 1 - step / total_steps
    """

    def __call__(self, step: int, total_steps: int, **args: Any) -> float:
        """Return the learning rate as a multiple of `optimizer.lr`."""


def examples() -> Iterator[tuple[str, str]]:
    """Yield the name of each interface and the code of its example."""
    import inspect
    import textwrap

    for kind in (
        ModelPart,
        DataPart,
        LossPart,
        MetricPart,
        CallbackPart,
        OptimizerPart,
        SchedulePart,
    ):
        text = inspect.getdoc(kind) or ""
        lines = [line for line in text.splitlines() if line.startswith("    ") or not line]
        yield kind.__name__, textwrap.dedent("\n".join(lines)).strip()
