"""Data sources and prepared tokens, without torch.

Input: the data section of a `Config`. Output: a store of tokens and labels in the cache.
Begin with `sources.request` (a source and its identity) and `preparation` (tokenization).
"""
