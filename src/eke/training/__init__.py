"""Training: model, optimizer, batches, distribution, loop, checkpoints, memory traces.

Input: `plan.json` of a run folder. Output: checkpoints, `metrics.jsonl` and `record.json`.
Begin with `loop.worker` (the process), `loop.loop` (the steps) and `model` (the model).
"""
