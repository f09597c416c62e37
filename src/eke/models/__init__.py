"""Model families, sizes and checkpoints, without torch.

Input: a model's configuration or the files of a checkpoint. Output: parameters, FLOPs and bytes in
closed form. Begin with `sizes`, `families` and `checkpoints`.
"""
