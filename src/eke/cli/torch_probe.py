"""What torch says about this machine, asked in a process of its own.

eke's answer must not wait for its import, nor end with a driver that crashes it.
"""

import json
import subprocess
import sys
from typing import Any

from eke.common.process_env import SAFE_PATH

TIMEOUT_S = 60.0
"""Importing torch takes two seconds, and many times that from a cold network file system."""

QUESTIONS = """
import json, torch
cuda = torch.cuda.is_available()
found = {
    "version": torch.__version__,
    "built_for_cuda": torch.version.cuda,
    "cuda_available": cuda,
    "num_gpus": torch.cuda.device_count() if cuda else 0,
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "threads": torch.get_num_threads(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
}
print("\\n" + json.dumps(found))
"""


class TorchProbe:
    """A process that has begun to ask torch."""

    def __init__(self, questions: str = QUESTIONS, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.process = subprocess.Popen(
            [sys.executable, SAFE_PATH, "-c", questions],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """What it said, or `error` and why it said nothing."""
        try:
            out, err = self.process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {"error": f"importing torch took more than {self.timeout_s:g} s"}
        if self.process.returncode:
            lines = err.strip().splitlines() or [f"exit code {self.process.returncode}"]
            return {"error": lines[-1]}
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return found
