"""What the decoder of seq2seq reads: the target, shifted as the model's own class shifts it."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from eke.common.errors import RunError
from eke.plan.planner import Plan
from eke.training.model.heads import HEADS
from eke.training.model.model import model_configuration

Shift = Callable[[Tensor], Tensor]
"""Labels (rows, longest), padded with IGNORED, to the decoder's inputs of the same shape."""


def build_shift(plan: Plan) -> Shift | None:
    """The shift of the planned model's class; None for other tasks.

    No formula serves all families: T5 starts with a token of its config, mBART with the last one of
    the target, its language code. The class is asked, without weights.

    Raises:
        RunError: it has no such function, or its config.json lacks what the function reads.
    """
    if plan.config.task.option != "seq2seq_lm":
        return None
    import transformers  # as in `eke.training.model.model`

    config = model_configuration(plan)
    head = getattr(transformers, HEADS["seq2seq_lm"])
    kind = head._model_mapping[type(config)]
    model: Any = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    names = ("prepare_decoder_input_ids_from_labels", "_shift_right")
    methods = [getattr(model, name) for name in names if hasattr(kind, name)]
    alone: Any = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
    if not methods and alone is None:
        raise RunError(f"{kind.__name__} does not say how it shifts labels -> another checkpoint")
    # input_ids, pad_token_id and, where the family has one, decoder_start_token_id
    inputs = [] if methods else list(inspect.signature(alone).parameters)[1:]
    read = " ".join([*inputs, *map(inspect.getsource, methods)])
    for name in ("decoder_start_token_id", "pad_token_id"):
        if name in read and getattr(config, name, None) is None:
            raise RunError(
                f"config.json has no {name}, which {kind.__name__} needs -> add it there"
            )
    if methods:
        return cast(Shift, methods[0])
    values = [getattr(config, name) for name in inputs]
    return lambda labels: cast(Tensor, alone(labels, *values))
