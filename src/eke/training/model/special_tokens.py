"""The tokenizer's special ids, for the model that is trained on its tokens."""

from typing import Any

from torch import nn

from eke.data.sources import Vocabulary
from eke.plan.planner import Plan


def set_special_ids(model_config: Any, plan: Plan) -> None:
    """Tell a transformers configuration which ids pad, begin and end a text.

    The padding id is where decoders stop looking for a sequence's last token, so another
    tokenizer's id would do harm. eke's bytes need no change.

    Args:
        model_config: changed in place, before the model is built.
        plan: its vocabulary is read.
    """
    vocabulary = plan.vocabulary
    if vocabulary.is_bytes:
        return
    # Only a classifier has to know an end of text that pads.
    classifies = plan.config.task.option == "sequence_classification"
    model_config.pad_token_id = None if vocabulary.pad_is_eos and not classifies else vocabulary.pad
    model_config.bos_token_id = vocabulary.bos
    model_config.eos_token_id = vocabulary.eos
    if model_config.is_encoder_decoder:
        model_config.pad_token_id = model_config.decoder_start_token_id = vocabulary.pad


def is_padding_alone(vocabulary: Vocabulary, token: int) -> bool:
    """Whether a token stands nowhere but where a row is filled up."""
    frames = (vocabulary.frame, vocabulary.target_frame)
    written = {t for frame in frames for t in (*frame.prefix, *frame.suffix)}
    return token == vocabulary.pad and token not in {vocabulary.bos, vocabulary.eos, *written}


def learn_padding(plan: Plan, model: Any) -> tuple[str, ...]:
    """Have embeddings learn the rows of all tokens that rows are made of; returns their names.

    `nn.Embedding` gives the row of its `padding_idx` no gradient. Where that id is also an end of
    text, or an ordinary token of another tokenizer, the model could never learn it. The saved
    configuration keeps its ids.
    """
    if plan.vocabulary.is_bytes:
        return ()
    table = getattr(model.get_input_embeddings(), "weight", None)  # Perceiver's has none
    learnt = []
    for name, module in model.named_modules():
        index = getattr(module, "padding_idx", None)
        is_table = isinstance(module, nn.Embedding) and module.weight is table
        if is_table and index is not None and not is_padding_alone(plan.vocabulary, index):
            module.padding_idx = None
            learnt.append(name)
    return tuple(learnt)
