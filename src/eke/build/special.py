"""The tokenizer's special ids, for the model that is trained on its tokens."""

from typing import Any

from eke.plan import Plan


def set_special_ids(model_config: Any, plan: Plan) -> None:
    """Tell a transformers configuration which ids pad, begin and end a text.

    The padding id freezes its row of the embedding and is where decoders stop looking for a
    sequence's last token, so another tokenizer's id would do harm. eke's bytes need no change.

    Args:
        model_config: changed in place, before the model is built.
        plan: its vocabulary is read.
    """
    vocabulary = plan.vocabulary
    if vocabulary.is_bytes:
        return
    # An end of text that pads must still be learned; only a classifier has to know it.
    classifies = plan.config.task.option == "sequence_classification"
    model_config.pad_token_id = None if vocabulary.pad_is_eos and not classifies else vocabulary.pad
    model_config.bos_token_id = vocabulary.bos
    model_config.eos_token_id = vocabulary.eos
    if model_config.is_encoder_decoder:
        model_config.pad_token_id = model_config.decoder_start_token_id = vocabulary.pad
