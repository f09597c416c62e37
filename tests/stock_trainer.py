"""Hugging Face Trainer as it comes, on eight fixed samples a step: what it reports, as JSON.

`python stock_trainer.py PER_DEVICE ACCUMULATION`, also under torchrun; rank 0 prints.
"""

import json
import os
import sys
import tempfile

import torch

SAMPLES = 8


def stock_curve(per_device: int, accumulation: int) -> list[tuple[float, float]]:
    """Loss and gradient norm that Trainer logs for its first two steps, over the same samples."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    rows = [
        {"input_ids": torch.randint(0, 64, (8,)), "labels": torch.tensor(n % 2)}
        for n in range(SAMPLES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.0,  # so that the second step is the first one again
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return [(row["loss"], row["grad_norm"]) for row in logged]


if __name__ == "__main__":
    curve = stock_curve(int(sys.argv[1]), int(sys.argv[2]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(curve), flush=True)
    os._exit(0)
