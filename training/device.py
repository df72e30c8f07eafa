"""The device that a process trains on."""

from __future__ import annotations

import torch

from wane.training.errors import RunError
from wane.training.group import ALONE, Group


def choose_device(name: str, group: Group = ALONE) -> torch.device:
    """Returns the device. `auto` selects CUDA if torch finds a CUDA device, and otherwise the CPU. If several processes
    train together, each uses the device whose number is its local rank.

    Raises RunError if `cuda` is required but torch finds no CUDA device, or if a machine has fewer devices than
    processes.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("training.device is cuda, but torch finds no CUDA device")
    if name == "cpu" or group.alone:
        return torch.device(name)
    if group.local_size > (count := torch.cuda.device_count()):
        raise RunError(f"{group.local_size} processes for {count} CUDA device(s): each process needs its own")
    return torch.device(name, group.local_rank)
