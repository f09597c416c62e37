"""Model and task pairs that every promise is checked on, and data with every trap in it."""

CASES = {
    "causal_lm-llama": ("model=tiny", "task=causal_lm"),
    "causal_lm-gpt2": ("model=tiny_gpt2", "task=causal_lm"),
    "masked_lm-bert": ("model=tiny_bert", "task=masked_lm"),
    "classification-bert": ("model=tiny_bert", "task=sequence_classification", "task.num_labels=3"),
    "classification-llama": ("model=tiny", "task=sequence_classification"),
    "seq2seq-t5": ("model=tiny_t5", "task=seq2seq_lm", "task.target_len=12"),
}

SMOOTH = {"seq2seq-t5": ("model.gated=true", "optimizer.eps=1e-6")}
"""T5's ReLU has a kink, and Adam divides what is nearly zero by itself: rounding decides about an
update now and then, in one process cut into other micro-batches, too (notes/lab/sharding.md). On
another CPU it decides otherwise."""

RAGGED = (
    "data=synthetic",
    "data.lengths=uniform",
    "data.min_len=5",
    "data.seq_len=24",
    "data.num_samples=31",  # 12 + 12 + 7: the last step of each epoch is uneven
    "data.num_eval_samples=4",
    "train.steps=8",
    "train.log_every=24",
    "train.checkpoint_every=null",
    "train.save_final=false",
    "optimizer.lr=3e-3",
)

ONE_SHAPE = ("model.num_hidden_layers=1", "data.pad_to_multiple_of=24", "data.num_samples=24")
"""Rows as ragged, in batches of one shape: compiled code is traced again for each other one."""
