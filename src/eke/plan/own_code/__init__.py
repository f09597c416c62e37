"""Own code of users, named by import path: found, hashed and frozen when a run is planned.

`find_code` reads texts and imports nothing. `serve` imports the frozen texts in other processes:
the probe, memory traces and workers.
"""

from eke.plan.own_code.arguments import (
    call_part,
    check_arguments,
    load_part,
    named_errors,
    where_raised,
)
from eke.plan.own_code.facts import Found, OwnFacts
from eke.plan.own_code.find import Code, CodeFile, find_code, target_key
from eke.plan.own_code.frozen import (
    code_store,
    freeze_code,
    frozen_folder,
    has_own_texts,
    serve_code,
    store_code,
)
