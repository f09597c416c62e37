"""What `eke export --merge` writes is, of any family, what PEFT makes of the exported adapter."""

import pytest
import torch
import transformers
from checkpoints import TASK_OF, save_checkpoint, save_unknown
from trained import record_of, train_job

from eke.config.compose import compose
from eke.plan.planner import write_plan
from eke.plan.record import write_record
from eke.training.model.model_checks import HEADS
from eke.workflows.export import export
from eke.workflows.planning import plan_for

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 asks by a name that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
SHORT = (
    "model=pretrained", "model.name_or_path=base", "data=synthetic", "data.seq_len=16",
    "data.max_token=300", "train.steps=2", "optimizer.lr=0.01", "hardware=cpu", "tracker=none",
)  # fmt: skip
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IDS = torch.arange(5, 17).reshape(1, 12)


@pytest.mark.parametrize(
    ("family", "method", "precision"),
    [
        ("gpt2", "lora", "bf16"),  # whose weights lie the other way round
        ("t5", "lora", "fp16"),  # whose class keeps some layers in float32
        ("bert", "ia3", "bf16"),
        ("mixtral", "lora", "bf16"),  # whose experts have other names in a file
        ("qwen3", "dora", "bf16"),
        ("phi", "lora", "fp32"),  # of which eke has no closed form
    ],
)
def test_merged_weights_and_logits_match_peft(
    family, method, precision, tmp_path, monkeypatch
) -> None:
    from peft import PeftModel  # takes seconds, also where tests are only collected

    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    save_unknown(base) if family == "phi" else save_checkpoint(base, family)
    task = TASK_OF.get(family, "causal_lm")
    typed = (*SHORT, f"task={task}", f"peft={method}", f"precision={precision}")
    plan = plan_for(compose(typed), planning=False)
    (tmp_path / "runs").mkdir()
    job = train_job(plan, tmp_path / "runs" / "one")
    write_plan(job.paths, plan)
    write_record(job.paths, record_of(job))
    export("one", "merged", merge=True)
    export("one", "adapter")
    plain = getattr(transformers, HEADS[task])
    merged, info = plain.from_pretrained("merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = PeftModel.from_pretrained(
        plain.from_pretrained(base, dtype=FORMATS[precision]), "adapter"
    )
    expected = loaded.merge_and_unload()
    tensors = merged.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    more = {"decoder_input_ids": IDS} if family == "t5" else {}
    with torch.no_grad():
        mine, theirs = (model.eval()(IDS, **more).logits for model in (merged, expected))
    assert torch.equal(mine, theirs)
