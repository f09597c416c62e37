"""The processes that somebody started for one command: which one this is, and which of them speaks.

Every command needs to know, so that nothing here knows how runs are started.
"""

from eke.peers.environment import SAFE_PATH, child_environment, module_command
from eke.peers.ranks import (
    check_started_ranks,
    is_first,
    let_rank_0_speak,
    machines_at_hand,
    my_rank,
    ranks_are_started,
)
from eke.peers.speech import speak
from eke.peers.task import Task, check_started_tasks, this_task

__all__ = [
    "SAFE_PATH",
    "Task",
    "check_started_ranks",
    "check_started_tasks",
    "child_environment",
    "is_first",
    "let_rank_0_speak",
    "machines_at_hand",
    "module_command",
    "my_rank",
    "ranks_are_started",
    "speak",
    "this_task",
]
