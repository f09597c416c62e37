"""Estimates of a plan's memory and time.

Input: a `Plan`. Output: a `Forecast` of bytes, and an estimate of the step time, both as ranges.
Begin with `memory.forecast` and `time.estimate`.
"""
