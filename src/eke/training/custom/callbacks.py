"""Callbacks of own code, called on rank 0 with the events and arguments of transformers."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eke.common.errors import RunError
from eke.common.text import suggest_match
from eke.config.parts import Part, own_parts
from eke.config.schema.custom import OnError
from eke.plan.own_code import call_part, where_raised
from eke.plan.planner import Plan
from eke.training.custom import refuse
from eke.training.loop.meter import capture_random_state, restore_random_state

if TYPE_CHECKING:
    from eke.training.loop.training_state import TrainingState

_STATES = "own_code.pt"
"""File of a checkpoint with the states of callbacks."""

_EVENTS = ("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end",
           "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step",
           "on_step_end", "on_evaluate", "on_log", "on_save")  # fmt: skip
_NEVER = ("on_predict", "on_prediction_step", "on_push_begin")
"""Events of transformers that eke does not have."""


class _Arguments:
    """Values of a run under the names of transformers' TrainingArguments."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        train, batch = plan.config.train, plan.batch
        self.output_dir = str(folder)
        self.run_name, self.seed, self.max_steps = plan.run_id, plan.config.seed, plan.steps.total
        self.num_train_epochs = plan.steps.total / plan.steps.per_epoch
        self.per_device_train_batch_size = batch.per_device
        self.per_device_eval_batch_size = batch.eval_per_device
        self.gradient_accumulation_steps, self.world_size = batch.accumulation, batch.world_size
        self.learning_rate = plan.config.optimizer.lr
        self.weight_decay = plan.config.optimizer.weight_decay
        self.warmup_steps, self.max_grad_norm = plan.steps.warmup, train.max_grad_norm
        self.logging_steps, self.eval_steps = train.log_every, train.eval_every
        self.save_steps, self.process_index, self.local_process_index = train.checkpoint_every, 0, 0

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(vars(self))
        raise AttributeError(f"args.{name} has no counterpart in eke. args has {known}")


class OwnCallbacks:
    """All callbacks of a run."""

    def __init__(self, job: "TrainingState") -> None:
        self.job = job
        parts = [part for part in own_parts(job.plan.config) if part.key.startswith("callbacks.")]
        self.is_used = bool(parts)
        self.objects: dict[str, tuple[Any, _Arguments]] = {}
        if not parts or not job.ranks.is_main:
            return
        from transformers.trainer_callback import TrainerControl, TrainerState

        self.control, steps = TrainerControl(), job.plan.steps
        self.state = TrainerState(max_steps=steps.total, log_history=[])
        self.state.num_train_epochs = -(-steps.total // steps.per_epoch)
        for part in parts:
            name = part.key.partition(".")[2]
            folder = job.paths.folder / "callbacks" / name
            self.objects[name] = build_callback(part), _Arguments(job.plan, folder)

    def call(self, event: str, step: int, **given: Any) -> None:
        """Call an event of every callback after `step` steps, with random state and weights kept.

        RunError: A callback changed weights, or failed with `on_error=fail`.
        """
        if not self.objects:
            return
        job = self.job
        self.state.global_step = step
        self.state.epoch = step / job.plan.steps.per_epoch
        # A sharded model computes only on all ranks together.
        sharded = job.plan.ranks.fsdp or job.plan.ranks.zero_stage == 3
        given |= {"model": None if sharded else job.bare_model, "optimizer": job.optimizer}
        given |= {"processing_class": job.tokenizer, "lr_scheduler": None}
        for name, (found, arguments) in list(self.objects.items()):
            if method := getattr(found, event, None):
                Path(arguments.output_dir).mkdir(parents=True, exist_ok=True)
                self._call(name, method, arguments, given)

    def _call(
        self, name: str, method: Callable[..., Any], arguments: _Arguments, given: dict[str, Any]
    ) -> None:
        job, random, before = self.job, capture_random_state(), self._versions()
        is_training = job.bare_model.training
        try:
            answer = method(arguments, self.state, self.control, **given)
            self.control = self.control if answer is None else answer
        except Exception as error:
            where = where_raised(error)
            why = f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")
            why = f"callbacks.{name}: {method.__name__} raised {why}"
            if job.plan.config.callbacks[name].on_error is OnError.fail:
                raise RunError(why) from error
            del self.objects[name]
            job.warn(f"{why}. The callback is switched off")
        finally:
            restore_random_state(random)
        if job.bare_model.training != is_training:
            job.model.train(is_training)
        if self._versions() != before:
            why = "changed weights. A callback only observes a run"
            raise RunError(f"callbacks.{name}: {method.__name__} {why}")

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.job.bare_model.parameters()]

    def requests(self) -> tuple[bool, bool, bool]:
        """Return whether callbacks requested a stop, a checkpoint and an evaluation. Collective."""
        if not self.is_used:
            return False, False, False
        wanted = (False, False, False)
        if self.job.ranks.is_main:
            flags = ("should_training_stop", "should_save", "should_evaluate")
            wanted = tuple(bool(getattr(self.control, flag)) for flag in flags)  # type: ignore[assignment]  # three flags
            for flag in flags[1:]:
                setattr(self.control, flag, False)
        found: tuple[bool, bool, bool] = self.job.ranks.tell(wanted)
        return found

    def save(self, folder: Path) -> None:
        """Write the states into a checkpoint, if any. One that needs code to load is left out."""
        states = {}
        for name, (found, _) in self.objects.items():
            if hasattr(found, "state_dict"):
                held = io.BytesIO()
                try:
                    torch.save(found.state_dict(), held)
                    states[name] = torch.load(io.BytesIO(held.getvalue()), weights_only=True)
                except Exception as error:
                    why = f"callbacks.{name}.state_dict cannot be saved as plain data"
                    self.job.warn(f"{why}: {str(error).splitlines()[0]}")
        if states:
            torch.save(states, folder / _STATES)

    def load(self, folder: Path) -> None:
        """Restore the states of a checkpoint."""
        if self.objects and (folder / _STATES).is_file():
            for name, state in torch.load(folder / _STATES, weights_only=True).items():
                if name in self.objects:
                    self.objects[name][0].load_state_dict(state)


def build_callback(part: Part) -> Any:
    """Build a callback. RunError: It has an event that does not exist, or none."""
    made = call_part(part)
    kind = type(made)
    own = {n for cls in kind.__mro__ if not cls.__module__.startswith("transformers.")
           for n in vars(cls) if n.startswith("on_")}  # fmt: skip
    for name in sorted(own - {*_EVENTS}):
        near = suggest_match(name, list(_EVENTS))
        fix = f"rename it to {near}" if near and name not in _NEVER else ""
        raise refuse(part, f"{kind.__name__}.{name} is no event of a run", fix)
    if not own and not any(hasattr(kind, event) for event in _EVENTS):
        raise refuse(part, f"{kind.__name__} has no event, for example on_step_end")
    return made
