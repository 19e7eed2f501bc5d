"""Learning rates: a pure function of the settings and of how many updates were applied, and of nothing else."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stenograph.config_training import OptimizerConfig


def schedule(optimizer: Optimizer, config: OptimizerConfig, num_updates: int, *, applied: int = 0) -> LambdaLR:
    """The schedule of `optimizer` after `applied` updates; `step()` it after each applied one, and only then.

    Updates count from 1. Those of the warm-up rise linearly: update u has lr * u / lr_warmup, so that the first has
    lr / lr_warmup and the last has lr. Without a warm-up, update 1 has lr. From there linear and cosine fall to lr_min,
    which update `num_updates` + 1, the first past the end, has, and all behind it; constant stays at lr. A warm-up that
    is longer than `num_updates` is made to its end.

    Whatever rate the optimizer has, of its construction or of a state that was loaded, is replaced at once.
    """

    def rate(applied: int) -> float:
        update = applied + 1
        if update <= config.lr_warmup:
            return config.lr * (update / config.lr_warmup)
        if config.lr_schedule == "constant":
            return config.lr
        if update > num_updates:
            return config.lr_min
        peak = max(1, config.lr_warmup)
        progress = (update - peak) / (num_updates + 1 - peak)
        fallen = progress if config.lr_schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return config.lr - fallen * (config.lr - config.lr_min)

    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0  # the factor is the rate itself: lr * (lr_min / lr) need not be lr_min
    return LambdaLR(optimizer, rate, last_epoch=applied - 1)
