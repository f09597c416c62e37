"""The model with its adapters merged, written when training has ended."""

import logging
import os

from eke.common.files import remove_tree
from eke.config.schema import Adapters
from eke.training.checkpoint.sharded import ShardedUpdate
from eke.training.distributed.deepspeed_update import DeepSpeedUpdate
from eke.training.distributed.sharding import put_together
from eke.training.loop.state import Job
from eke.training.model.export import save_pretrained
from eke.training.model.peft import merge_adapters

log = logging.getLogger(__name__)


def save_merged(job: Job) -> None:
    """Write `merged` into the run folder where `peft.save_merged` asks for it; the last act.

    It is in the hub's layout, complete under its name or not there, and replaces an earlier one.

    Raises:
        OSError: the disk is full.
    """
    config, final = job.plan.config.peft, job.paths.merged
    if not (isinstance(config, Adapters) and config.save_merged):
        return
    weights = None
    if isinstance(job.update, ShardedUpdate | DeepSpeedUpdate):
        weights = job.update.all_weights(keep=job.ranks.is_main)  # of all ranks
    if not job.ranks.is_main:
        return
    if weights is not None:
        put_together(job.bare_model, weights)
    unfinished = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        save_pretrained(merge_adapters(job.bare_model), unfinished, job.tokenizer)
        remove_tree(final)
        os.replace(unfinished, final)
    finally:
        remove_tree(unfinished)
    log.info("merged model: %s", final)
