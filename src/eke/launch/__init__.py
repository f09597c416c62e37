"""Launchers: start plans as processes, without torch.

Input: plans. Output: run folders with records, and `sweep.json`. Begin with `interface` (the
protocol of a launcher), `local` (this machine's devices) and `processes.sweep` (supervision).
"""
