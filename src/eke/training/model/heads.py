"""Which of transformers' classes has the head of a task."""

HEADS: dict[str, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
"""`task.option` -> transformers' class with that head."""
