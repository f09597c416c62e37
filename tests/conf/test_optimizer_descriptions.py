"""Every optimizer has a complete entry, and no other module names one."""

import ast
import inspect
from pathlib import Path
from pkgutil import resolve_name

import pytest
from support import REPO
from unit.models.sizes.configs import make_config

from eke.config.compose.catalogue import make_catalogue
from eke.config.schema.techniques import OPTIMIZERS
from eke.estimate.time.memory_traffic import counts
from eke.models.sizes import OPTIMIZER_REGISTRY, optimizer_entry, structure
from eke.models.sizes.optimizers import AUTO, LOOPS, optimizer_bytes, unknown_temporaries

SOURCE = REPO / "src" / "eke"


def test_every_option_has_an_entry() -> None:
    assert set(OPTIMIZER_REGISTRY) == set(make_catalogue().options["optimizer"])


def fields_of(option: str) -> str:
    """The schema that the option's file names."""
    text = (REPO / "conf" / "optimizer" / f"{option}.yaml").read_text()
    (line,) = [line for line in text.splitlines() if "/schema/optimizer/" in line]
    return line.partition("/schema/optimizer/")[2].partition("@")[0]


OWN_CODE = "custom"
"""Option with the user's own optimizer, whose facts are unknown."""


@pytest.mark.parametrize("option", [o for o in OPTIMIZER_REGISTRY if o != OWN_CODE])
def test_entry_is_complete(option) -> None:
    known = OPTIMIZER_REGISTRY[option]
    assert list(inspect.signature(resolve_name(known.builder)).parameters) == ["plan", "groups"]
    config = make_config("model=tiny", f"optimizer={option}")
    assert type(config.optimizer) is OPTIMIZERS[fields_of(option)]
    assert optimizer_entry(config.optimizer) is known
    assert optimizer_bytes(config, structure(config).weights) > 0
    # A run can tell whether it is what was asked for: by its class, or by an effect on its states.
    seen = (
        known.built or known.quantises or known.projects or known.pages or known.stochastic_rounding
    )
    assert seen
    assert known.implementation or known.temporaries is not unknown_temporaries
    # Its step was counted, or what stands in for it was.
    loop = "fused" if known.implementation == AUTO else known.implementation
    counted = known.counted_as or (f"adamw_{loop}" if loop else option)
    assert f"{counted}/wide" in counts("counted_updates")


@pytest.mark.parametrize("option", OPTIMIZER_REGISTRY)
def test_optimizer_entry_refers_to_existing_options(option) -> None:
    known = OPTIMIZER_REGISTRY[option]
    assert {known.unquantised, known.twin or "adamw", known.counted_as or "adamw"} <= {
        *OPTIMIZER_REGISTRY
    }
    assert known.implementation in {"", AUTO, *LOOPS}
    if known.twin:
        assert OPTIMIZER_REGISTRY[known.twin].implementation in LOOPS
    if known.cuda_only:
        assert known.twin, "the rule that refuses it on a CPU proposes this"


@pytest.mark.parametrize("option", OPTIMIZER_REGISTRY)
def test_card_names_the_package(option) -> None:
    text = (REPO / "conf" / "optimizer" / f"{option}.yaml").read_text()
    (needs,) = [line for line in text.splitlines() if line.startswith("# Needs ")]
    known = OPTIMIZER_REGISTRY[option]
    assert bool(known.package) == bool(known.install)
    assert known.install in needs if "pip install" in known.install else True
    assert ("pip install" in needs) == ("pip install" in known.install)


NAMES_IT = {
    "config/schema/": "the fields themselves",
    "models/sizes/": "the registry",
    "training/optimizer/": "builds it, and reads the fields that its library takes",
    "rules/requirements.py": "what to type where a package is missing: a default, not a fact",
    "rules/training.py": "two fields of one schema that contradict each other",
    "rules/techniques.py": "the table of techniques",
    "estimate/time/memory_traffic.py": "the key of what was counted where nothing else is known",
    "plan/planner/deepspeed_config.py": "DeepSpeed's own names of optimizers",
}
"""Modules that may name an optimizer, and why. An override in a text (`optimizer=adamw`) is advice,
which may name any."""


def named_in(path: Path) -> set[str]:
    """Optimizers a module names: strings that are an option, schemas that it imports, and prefixes
    that it looks for in an option's name."""
    tree = ast.parse(path.read_text())
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    schemas = {schema.__name__ for schema in OPTIMIZERS.values()}
    names = OPTIMIZER_REGISTRY.keys() - {OWN_CODE}  # also an option of other groups
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in said and text in names:
                found.add(text)
            case ast.ImportFrom(module=str(module)) if module.startswith("eke.config.schema"):
                found |= schemas & {alias.name for alias in node.names}
            case ast.Attribute(value=ast.Name(), attr=name) if name in schemas:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith", value=value)):
                if ast.unparse(value).endswith("optimizer.option"):
                    found.add(ast.unparse(node))
    return found


@pytest.mark.slow
def test_optimizer_names_stay_in_allowed_modules() -> None:
    names = {
        str(path.relative_to(SOURCE)): found
        for path in sorted(SOURCE.rglob("*.py"))
        if (found := named_in(path))
    }
    others = {path: found for path, found in names.items() if not path.startswith((*NAMES_IT,))}
    assert others == {}, "ask eke.models.sizes.optimizer_entry for a fact"
    assert all(any(path.startswith(allowed) for path in names) for allowed in NAMES_IT)
