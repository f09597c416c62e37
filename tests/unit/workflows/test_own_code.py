"""Wrong own code is rejected when the run is planned, with key, reason and fix."""

import inspect
import time

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.estimate.memory import stop_tracing, trace_client
from eke.workflows.planning import plan_for

pytestmark = pytest.mark.slow  # a process imports torch

NET = """
    import sys
    import lightning_like
    from pathlib import Path
    from torch import nn
    import torch

    limit = 3

    class Net(nn.Module):
        def __init__(self, width: int = 4, fail: bool = False):
            super().__init__()
            if fail:
                raise ValueError("too wide")
            self.fc = nn.Linear(width, 1)

        def forward(self, x, y):
            out = self.fc(x)[:, 0]
            return out, ((out - y) ** 2).mean()

    class Silent(Net):
        def forward(self, x):
            return self.fc(x)

    class Two(Net):
        def forward(self, x, y):
            return self.fc(x).sum(), self.fc(x).mean()

    class Needs(Net):
        def forward(self, image, y):
            return self.fc(image), (y ** 2).mean()

    class Vector(Net):
        def forward(self, x, y):
            return {"loss": self.fc(x)[:, 0] - y}

    class Constant(Net):
        def forward(self, x, y):
            return {"loss": y.mean()}

    class Lightning(Net):
        def training_step(self, batch):
            pass

    def number():
        return 3

    def build(width: int, **more):
        return Net(width)

    class outer:
        class Inner(Net):
            pass
"""
DATA = """
    import sys, time, torch
    from torch.utils.data import DataLoader

    class Rows:
        def __init__(self, split="train", n: int = 32, ragged: bool = False, kind: str = "list"):
            self.n, self.ragged = n, ragged

        def __len__(self):
            return self.n

        def __getitem__(self, index):
            g = torch.Generator().manual_seed(index)
            x = torch.randn(4 + (index if self.ragged else 0), generator=g)
            return {"x": x, "y": x.sum()}

    def loader(split):
        return DataLoader(Rows())

    class Drifts(Rows):
        count = 0

        def __getitem__(self, index):
            Drifts.count += 1
            return {"x": torch.full((4,), float(Drifts.count)), "y": torch.zeros(())}

    class Fails(Rows):
        def __getitem__(self, index):
            raise KeyError("no such row")

    def large(split):
        torch.zeros(3 * 2**30)
        return Rows()

    def nothing(split):
        return 3

    def waits(split):
        sys.stdin.readline()
        print("hello")
        return Rows()
"""
PARTS = """
    from torch.optim.lr_scheduler import StepLR

    def loss(output, batch, power: float = 2.0):
        return output.mean()

    class NoCompute:
        def update(self, output, batch): ...
        def reset(self): ...

    class NoEvent:
        def on_step_ends(self, args, state, control, **kwargs): ...
"""
RIGHT = ("model=custom", "model.target=net.Net", "data=custom", "data.target=rows.Rows",
         "hardware=cpu", "tracker=none")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache folder for all tests, since they share the tracing process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        stop_tracing()
        yield
        stop_tracing()


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project in the current folder."""
    files = {"net": NET, "rows": DATA, "parts": PARTS, "lightning_like": "", "broken": "def f(:"}
    files["exits"] = "raise SystemExit(3)"
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(inspect.cleandoc(text) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(*typed):
    return plan_for(compose([*RIGHT, *typed]), planning=True)


def test_right_code_is_planned():
    plan = planned("data.args.n=40", "model.args.width=4")
    assert plan.size.num_parameters == 5
    assert plan.steps.num_train_samples == 40
    assert plan.config.task.option == "custom"
    assert plan.size.flops_per_sample == 16, "forward, and the gradient of the weight"


def test_input_and_output_while_code_runs_do_no_harm():
    assert planned("data.target=rows.waits").steps.num_train_samples == 32


@pytest.mark.parametrize(
    ("typed", "key", "said", "words"),
    [
        (["model.target=nett.Net"], "model.target", "nett", ["model.target=net.Net"]),
        (["model.target=zzz.Net"], "model.target", "zzz", ["code.path=FOLDER"]),
        (["model.target=net.Nett"], "model.target", "Nett", ["model.target=net.Net"]),
        (["model.target=net.limit"], "model.target", "callable", None),
        (["model.target=exits.Net"], "model.target", "SystemExit: 3", None),
        (["model.target=broken.Net"], "model.target", "broken.py:1", None),
        (["model.target=net.number"], "model.target", "int", None),
        (["model.target=net.Lightning"], "model.target", "LightningModule", None),
        (["model.args.widthh=4"], "model.args.widthh", "width", ["model.args.width=4"]),
        (["model.args.width=wide"], "model.args.width", "whole number", None),
        (["model.target=net.build"], "model.args.width", "width", ["model.args.width=VALUE"]),
        (["model.args.fail=true"], "model.target", "ValueError: too wide", None),
        (["model.target=net.Silent"], "loss", "no loss", None),
        (["model.target=net.Two"], "loss", "2 losses", None),
        (["model.target=net.Needs"], "model.inputs.image", "image", ["model.inputs.image=x"]),
        (["model.target=net.Vector"], "loss", "not one number", None),
        (["model.target=net.Constant"], "loss", "no gradient", None),
        (["model.inputs.z=x"], "model.inputs.z", "x, y", None),
        (["data.target=rows.Row"], "data.target", "Row", ["data.target=rows.Rows"]),
        (["data.target=rows.loader"], "data.target", "DataLoader", None),
        (["data.target=rows.nothing"], "data.target", "int", None),
        (["data.target=rows.Drifts"], "data.target", "twice", ["data.repeatable=false"]),
        (["data.target=rows.Fails"], "data.target", "no such row", None),
        (["data.target=rows.large"], "data.target", "8 GiB", None),
        (["data.args.n=0"], "data.target", "empty", None),
        (["data.args.ragged=true"], "data.target", "stack", None),
        (["data.keys=[a,b]"], None, None, None),
        (["data.files=[missing.txt]"], "data.files", "missing.txt", None),
        (["loss.per=z"], "loss.per", "z", ["loss.per=samples"]),
        (["loss=custom", "loss.target=parts.loss", "loss.args.powr=1"], "loss.args.powr", "power",
         ["loss.args.power=1"]),
        (["metrics.a.target=parts.NoCompute"], "metrics.a.target", "compute", None),
        (["callbacks.a.target=parts.NoEvent"], "callbacks.a.target", "on_step_end", None),
        (["schedule=custom", "schedule.target=torch.optim.lr_scheduler.StepLR"], "schedule.target",
         "scheduler", None),
        (["optimizer=custom", "optimizer.target=torch.optim.SGD", "optimizer.args.momentun=0.9"],
         "optimizer.args.momentun", "momentum", ["optimizer.args.momentum=0.9"]),
        (["peft=lora"], "peft", "", None),
        (["engine=trainer"], "engine", "", None),
    ],
)  # fmt: skip
def test_wrong_code_is_rejected_with_its_key(typed, key, said, words):
    if key is None:
        assert planned(*typed)
        return
    with pytest.raises(ConfigError) as error:
        planned(*typed)
    assert [problem.key for problem in error.value.problems] == [key], error.value
    (problem,) = error.value.problems
    assert said in f"{problem.why} {problem.value}"
    if words is not None:
        assert [*problem.fix.words] == words


@pytest.mark.parametrize("typed", [
    "model.target=./net.py", "model.target=net/model.Net", "model._target_=net.Net",
    "model.width=3", "model.args._args_=[1]", "model.target=<lambda>", "callbacks.x=parts.NoEvent",
])  # fmt: skip
def test_wrong_spelling_is_rejected_with_a_fix(typed):
    with pytest.raises(ConfigError) as error:
        planned(typed)
    (problem,) = error.value.problems
    assert problem.fix or typed == "model.args._args_=[1]"


def test_endless_import_is_stopped(project, monkeypatch):
    (project / "endless.py").write_text("while True: pass\n")
    monkeypatch.setattr(trace_client, "_LIMIT_S", 2.0)
    start = time.monotonic()
    with pytest.raises(ConfigError):
        planned("model.target=endless.Net")
    assert time.monotonic() - start < 60


def test_second_plan_of_the_same_code_starts_no_process(monkeypatch):
    first = planned()
    monkeypatch.setattr(trace_client.TraceProcess, "request", None)
    assert planned().run_id == first.run_id


LLAMA = """
    import torch
    from torch import nn
    import torch.nn.functional as F

    def norm(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight)

    class Block(nn.Module):
        def __init__(self, width, heads, inner):
            super().__init__()
            self.heads = heads
            self.before, self.after = (nn.Parameter(torch.ones(width)) for _ in range(2))
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x):
            h = norm(x, self.before)
            split = (layer(h).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
            q, k, v = (each.transpose(1, 2) for each in split)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(a.transpose(1, 2).flatten(2))
            h = norm(x, self.after)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Llama(nn.Module):
        def __init__(self, width=128, layers=4, heads=4, inner=352, vocab=320):
            super().__init__()
            self.table = nn.Embedding(vocab, width)
            self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
            self.norm = nn.Parameter(torch.ones(width))

        def forward(self, idx):
            x = self.table(idx)
            for block in self.blocks:
                x = block(x)
            return F.linear(norm(x, self.norm), self.table.weight)
"""


def test_flops_of_a_rewritten_llama_are_those_of_the_formula(project):
    (project / "llama.py").write_text(inspect.cleandoc("\n" + LLAMA) + "\n")
    shared = ("data=synthetic", "data.seq_len=256", "hardware=cpu", "tracker=none")
    own = plan_for(
        compose(
            ["model=custom", "model.target=llama.Llama", "model.inputs.idx=input_ids", *shared]
        ),
        planning=True,
    )
    known = plan_for(compose(["model=tiny", *shared]), planning=True)
    assert own.size.num_parameters == known.size.num_parameters
    assert own.size.flops_per_sample == pytest.approx(known.size.flops_per_sample, rel=0.01)
    assert own.config.model.num_hidden_layers == 4
