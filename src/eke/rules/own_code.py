"""Rules about code of the user's own, which techniques for transformers' models cannot change."""

from eke.common.errors import Fix
from eke.config.parts import own_parts
from eke.config.schema import Backend, CustomData, CustomModel, Packing
from eke.rules.rule import Rule, RuleInputs


def _own_model(facts: RuleInputs) -> bool:
    return isinstance(facts.config.model, CustomModel)


RULES = dict(
    own_model_has_no_adapters=Rule(
        key="peft",
        when=lambda f: _own_model(f) and f.config.peft.is_on,
        why="adapters and their export are for models of transformers, not for model=custom",
        source="eke.models.sizes.adapted_layers: names of layers of the families",
    ),
    own_model_has_no_kernels=Rule(
        key="kernels",
        when=lambda f: (
            _own_model(f)
            and (
                (k := f.config.kernels).is_on or k.fused_linear_cross_entropy or k.sparse_prediction
            )
        ),
        why="fused kernels replace modules of transformers, not of model=custom",
        fix=Fix("kernels=none"),
        source="eke.models.families: replacements of each family",
    ),
    own_model_computes_attention=Rule(
        key="attention",
        when=lambda f: (
            _own_model(f)
            and (f.config.attention.option != "sdpa" or f.config.attention.backend != Backend.auto)
        ),
        why="model=custom computes attention in its own code",
        fix=lambda f: Fix("attention=auto", "attention.backend=auto"),
        source="set_attn_implementation is a method of transformers' models",
    ),
    own_code_needs_loop=Rule(
        key="engine",
        when=lambda f: f.config.engine.option == "trainer" and own_parts(f.config),
        why=lambda f: (
            f"Trainer has no place for {', '.join(p.key for p in own_parts(f.config))} of your own"
        ),
        source="transformers.Trainer.compute_loss: a loss of the model's output",
    ),
    own_samples_have_no_length=Rule(
        key="data",
        when=lambda f: (
            isinstance(d := f.data, CustomData)
            and (d.packing is not Packing.off or d.length_grouping or d.pad_to_multiple_of)
        ),
        why="packing, grouping by length and padding are for tokens, not for data=custom",
        fix=Fix("data.packing=off", "data.length_grouping=false", "data.pad_to_multiple_of=null"),
        source="samples have the keys that data.target returns",
    ),
)
