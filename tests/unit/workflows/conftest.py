"""Finished runs of small checkpoints, trained in this process."""

import pytest
from prepared import write_jsonl
from support import last_wins

from eke.config.compose import compose
from eke.plan.planner import write_plan
from eke.plan.record import write_record
from eke.workflows.planning import plan_for

SHORT = (
    "model=pretrained", "model.name_or_path=base", "data.path=rows.jsonl", "data.seq_len=64",
    "train.steps=2", "train.eval_every=null", "optimizer.lr=0.01", "hardware=cpu", "tracker=none",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<sep>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The working directory, with a cache of its own."""
    from eke.data.preparation.rows import prepare_store  # slow, and only these tests need it

    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr("eke.data.sources.request._run_preparation", prepare_store)
        yield root


@pytest.fixture(scope="module")
def train_kind(run_folder):
    """The job of a finished run with such an id; trained once."""
    from trained import record_of, train_job

    jobs = {}

    def make(kind, *overrides):
        if kind not in jobs:
            typed = last_wins(*SHORT, *overrides)
            if "data=synthetic" in typed:
                typed = tuple(t for t in typed if not t.startswith(("model.name", "data.path")))
            plan = plan_for(compose(typed), planning=False)
            folder = run_folder / "runs" / kind
            folder.mkdir(parents=True)
            jobs[kind] = train_job(plan, folder)
            write_plan(jobs[kind].paths, plan)
            write_record(jobs[kind].paths, record_of(jobs[kind]))
        return jobs[kind]

    return make


@pytest.fixture(scope="module")
def chat_base(run_folder):
    """The template of a checkpoint `base`, and rows of conversations and classes."""
    from checkpoints import save_checkpoint
    from transformers import AutoTokenizer

    save_checkpoint(run_folder / "base", tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(run_folder / "base")
    talk = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "a dog"}]
    rows = [{"messages": talk, "text": f"fox {n}", "label": "ny"[n % 2]} for n in range(40)]
    write_jsonl(run_folder / "rows.jsonl", rows)
    return TEMPLATE
