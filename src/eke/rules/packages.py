"""The rules about packages that an option needs and this environment lacks."""

from importlib.util import find_spec
from pathlib import Path

from eke.models.sizes import DESCRIPTIONS
from eke.rules.rule import Facts, Rule, Verdict

NEEDS: dict[tuple[str, str], tuple[str, str]] = {
    ("tracker", "wandb"): ("wandb", "pip install wandb"),
    ("tracker", "tensorboard"): ("tensorboard", 'pip install "eke[tensorboard]"'),
    ("tracker", "mlflow"): ("mlflow", 'pip install "eke[mlflow]"'),
    ("tracker", "trackio"): ("trackio", 'pip install "eke[trackio]"'),
    **{
        ("optimizer", option): (description.package, description.install)
        for option, description in DESCRIPTIONS.items()
        if description.package
    },
    ("attention", "flash2"): ("flash_attn", "pip install flash-attn --no-build-isolation"),
    ("attention", "flash3"): (
        "flash_attn_interface",
        "pip install -v . in the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    ("kernels", "liger"): ("liger_kernel", 'pip install "eke[liger]"'),
    ("peft", "lora"): ("peft", 'pip install "eke[peft]"'),
    ("peft", "dora"): ("peft", 'pip install "eke[peft]"'),
    ("peft", "ia3"): ("peft", 'pip install "eke[peft]"'),
    ("peft", "qlora"): ("peft bitsandbytes", 'pip install "eke[peft,bitsandbytes]"'),
    ("distributed", "zero1"): ("deepspeed", 'pip install "eke[deepspeed]"'),
    ("distributed", "zero2"): ("deepspeed", 'pip install "eke[deepspeed]"'),
    ("distributed", "zero3"): ("deepspeed", 'pip install "eke[deepspeed]"'),
}
"""Group and option -> the packages it imports, and the line that installs it (for an extra,
`pip install "eke[NAME]"`)."""

_INSTEAD = {
    "tracker": "none",
    "optimizer": "adamw",
    "attention": "sdpa",
    "kernels": "none",
    "distributed": "ddp",
    "peft": "none",
}
"""Group -> an option that needs no package."""


def _is_there(package: str) -> bool:
    """Whether `a.b` could be imported; `a` is not, which may take seconds and bring torch."""
    top, *inner = package.split(".")
    spec = find_spec(top)
    if spec is None or not inner:
        return spec is not None
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in places)


def _missing(facts: Facts, group: str) -> tuple[str, str] | None:
    """The first absent package of the group's option, and the line that installs it."""
    packages, line = NEEDS.get((group, getattr(facts.config, group).option), ("", ""))
    return next(((name, line) for name in packages.split() if not _is_there(name)), None)


def _found(facts: Facts, group: str) -> tuple[str, str]:
    found = _missing(facts, group)
    assert found is not None, "asked for a problem that is not there"
    return found


def _rule(group: str) -> Rule:
    return Rule(
        id="package_missing",
        verdict=Verdict.impossible,
        path=group,
        when=lambda f: not f.planning and _missing(f, group) is not None,
        value=lambda f: getattr(f.config, group).option,
        why=lambda f: f"needs the package {_found(f, group)[0]}, which is not installed",
        fix=lambda f: f"{group}={_INSTEAD[group]}   (or: {_found(f, group)[1]})",
        source="pyproject.toml",
    )


RULES = tuple(_rule(group) for group in _INSTEAD)
