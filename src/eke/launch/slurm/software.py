"""Which software the jobs of a submission find, and whether it changed where some have been.

Nodes and images may have other software than the machine that plans. So a change is another version
in the same place, as the planner or an earlier job saw it: each appends a line to one file.
"""

import json
from pathlib import Path

from eke.common.files import append_line, read_text
from eke.hardware import software_now, software_places
from eke.plan.identity import changed_fingerprint


def note_software(submission: Path, command_prefix: str = "") -> str:
    """Write down what is here, behind what others have seen.

    Args:
        submission: its file.
        command_prefix: what names an image, whose content may have moved in it.

    Returns:
        What differs from what they saw in the same place, and what helps; empty: nothing, or the
        file cannot be written.
    """
    file, now = submission.with_suffix(".software"), software_now()
    places = {
        part: f"{command_prefix} {folder if command_prefix else (folder, number)}"
        for part, (folder, number) in software_places().items()
    }
    mine = json.dumps([now, places])
    try:
        append_line(file, mine)
        lines = read_text(file).splitlines()
    except OSError:
        return ""
    for line in lines:
        if line == mine:
            break
        before, seen = json.loads(line)
        shared = {part for part, place in places.items() if seen.get(part) == place}
        changes = changed_fingerprint(
            {part: before[part] for part in shared}, {part: now[part] for part in shared}
        )
        if changes:
            told = "; ".join(changes)
            return f"the software has changed since the sweep was typed ({told}) -> type it again"
    return ""
