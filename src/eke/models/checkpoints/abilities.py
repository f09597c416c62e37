"""What a configured model can do, by the record of its family or the source of its class.

A run looks at the built model before it trains (`eke.training.model.unused`): source may mislead.
"""

from eke.config.schema import Config, PretrainedModel
from eke.models.checkpoints.architecture import change_of_logits, keeps_samples_apart
from eke.models.families import family_of


def can_pack(config: Config) -> bool:
    """Whether positions that begin anew keep the samples of a row apart."""
    model, family = config.model, family_of(config)
    if family.is_known or not isinstance(model, PretrainedModel):
        return family.is_decoder
    return keeps_samples_apart(model.model_type)


def logits_change(config: Config) -> str | None:
    """What is done to the logits after the projection, as of `change_of_logits`."""
    model = config.model
    if family_of(config).is_known or not isinstance(model, PretrainedModel):
        return ""
    return change_of_logits(model.model_type, config.task.option)
