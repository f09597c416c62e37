"""Facts of a checkpoint, read from its small files without torch and transformers."""

from eke.models.checkpoints.locate import is_of_eke_without_tokenizer, locate, resolve_tokenizer
from eke.models.checkpoints.resolve import content_of, follow_head, resolve_model
