"""What generates code needs a compiler: of C++ for a CPU, of C for a GPU's driver of Triton."""

import dataclasses

import pytest
from unit.rules.devices import CPU, V100

from eke.config.compose import compose
from eke.rules import RuleInputs, check

HERE = dataclasses.replace(V100, present=True)

OVERRIDES = {
    "compile=inductor": "inductor_needs_compiler",
    "optimizer=adamw_torchao_8bit": "torchao_needs_compiler",
    "attention=flex": "flex_needs_compiler",
    "kernels=liger": "liger_needs_compiler",
}


@pytest.fixture
def machine(monkeypatch):
    """Rules that are broken on a machine with these programs."""

    def ask(override, device, *programs, planning=False):
        monkeypatch.setattr("shutil.which", lambda name: name if name in programs else None)
        refused, _ = check(RuleInputs(compose([override]).config, device, planning=planning))
        return {problem.id: problem for problem in refused}

    monkeypatch.delenv("CC", raising=False)
    return ask


@pytest.mark.parametrize(("override", "rule"), OVERRIDES.items(), ids=OVERRIDES.values())
def test_gpu_requires_a_c_compiler(override, rule, machine, monkeypatch) -> None:
    refused = machine(override, HERE)
    assert str(refused[rule].fix).endswith("apt install gcc)")
    for compiler in ("gcc", "clang"):
        assert rule not in machine(override, HERE, compiler)
    assert rule in machine(override, HERE, "g++")
    monkeypatch.setenv("CC", "/opt/cc")
    assert rule not in machine(override, HERE)


@pytest.mark.parametrize(("override", "rule"), OVERRIDES.items(), ids=OVERRIDES.values())
def test_remote_compiler_is_not_checked_here(override, rule, machine) -> None:
    assert rule not in machine(override, HERE, planning=True)
    assert rule not in machine(override, dataclasses.replace(HERE, present=False))


@pytest.mark.parametrize("override", ["compile=inductor", "optimizer=adamw_torchao_8bit"])
def test_cpu_requires_a_cpp_compiler(override, machine) -> None:
    refused = machine(override, CPU, "gcc")
    assert str(refused[OVERRIDES[override]].fix).endswith("apt install g++)")
    assert OVERRIDES[override] not in machine(override, CPU, "g++")
