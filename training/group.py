"""The processes that train one run together, started by `torchrun`, and their communication.

Every process has the whole network and some lanes (parallel streams) of the batch. Only the first process (rank 0)
reads the experiment and the corpus and writes the run folder. It sends the data to the other processes. A single
process joins no process group and sends no data.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from wane.training.errors import LostError, RunError, TrainingError

T = TypeVar("T")

LAUNCHER_WAIT_S = 10.0
"""The seconds for which a healthy process waits until the launcher stops it, so that the launcher's message names the
failed process."""

TRANSPORT = "gloo/transport"
"""A text that occurs in the message of each gloo connection error. These errors are plain RuntimeErrors."""


class Group:
    """A process and its group. `rank`: the process's number, from 0, among the `size` processes of the group.
    `local_rank`: its number among the `local_size` processes on the same machine."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self._failing = self._ended = False

    @classmethod
    def join(cls) -> Group:
        """Joins the process group that torchrun describes in environment variables. Returns `ALONE` if there is no such
        group.

        The backend gloo sends CPU tensors, and the backend NCCL sends CUDA tensors. Raises RunError if the other
        processes are not found.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return ALONE
        try:
            store, rank, size = next(rendezvous("env://"))
            # After a restart by torchrun, the store still holds the addresses of the previous processes. Each attempt
            # therefore has its own prefix.
            attempt = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            dist.init_process_group(store=attempt, rank=rank, world_size=size)
        except (ValueError, RuntimeError) as error:
            raise RunError(f"the other processes were not found: {error}") from error
        local = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
        group = cls(rank, size, *local)
        signal.signal(signal.SIGTERM, group._on_sigterm)
        return group

    def leave(self) -> None:
        """Closes the process group and its threads.

        Networks keep references to the group, so Python would not close the group before interpreter shutdown. If a
        thread of the group released a tensor during the shutdown, the process would abort.
        """
        if not self.alone:
            dist.destroy_process_group()
            gc.collect()

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def launcher(self) -> list[str]:
        """The first words of a shell command, before `train`, that start a group of this size. `--` stops torchrun from
        reading `--run` as an abbreviation of one of its own options."""
        if self.alone:
            return ["wane"]
        nodes = ["--nnodes", str(self.size // self.local_size)] if self.size > self.local_size else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.local_size), "-m", "--", "wane"]

    # -- the division of a batch among the processes, and the random seeds

    def share(self, count: int) -> slice:
        """Returns this process's slice of `count` lanes. The sizes of two processes' slices differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def parallel(self, network: nn.Module) -> nn.Module:
        """Wraps the network: copies the first process's weights to all processes, and averages gradients over the
        processes."""
        return network if self.alone else DistributedDataParallel(network, gradient_as_bucket_view=True)

    def seed_noise(self, seed: int, step: int) -> None:
        """Seeds a step's dropout masks. The seed differs between processes. A resumed run that repeats the step uses
        the same seeds.

        A single process is not seeded: it continues its random sequence, whose state is in the checkpoints.
        """
        if not self.alone:
            torch.manual_seed(int(np.random.SeedSequence([seed, step, self.rank]).generate_state(1)[0]))

    # -- communication

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns each value's float64 sum over the processes. The sums are bit-identical in all processes."""
        if self.alone:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        totals: list[float] = sums.tolist()
        return totals

    def from_first(self, make: Callable[[], T]) -> T:
        """Calls `make` in the first process and returns its result in all processes. If `make` raises a TrainingError,
        all processes raise it."""
        if self.alone:
            return make()
        message: list[T | TrainingError | None] = [None]
        if self.first:
            try:
                message = [make()]
            except TrainingError as error:
                message = [error]
        dist.broadcast_object_list(message)
        (found,) = message
        if isinstance(found, TrainingError):
            raise found
        return found  # type: ignore[return-value]  # None is possible only if T allows None

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the `with` block raises a TrainingError in one process, all processes raise it, with that process's rank.
        The block must not communicate with other processes."""
        if self.alone:
            yield
            return
        mine: TrainingError | None = None
        try:
            yield
        except TrainingError as error:
            mine = error
        errors: list[TrainingError | None] = [None] * self.size
        dist.all_gather_object(errors, mine)
        for rank, found in enumerate(errors):
            if found is not None:
                raise found if rank == 0 else type(found)(f"rank {rank}: {found}")

    def gather(self, rows: list[Tensor]) -> list[Tensor]:
        """Collects the tensors `rows`, each of shape (lanes, ...), from all processes. The first process returns the
        same tensors with the lanes of all processes, on the CPU. The other processes return `rows`."""
        if self.alone:
            return rows
        parts: list[list[Tensor]] | None = [[]] * self.size if self.first else None
        dist.gather_object([tensor.detach().cpu() for tensor in rows], parts)
        return rows if parts is None else [torch.cat(whole) for whole in zip(*parts, strict=True)]

    def check_same(self, what: str, digest: Callable[[], str]) -> None:
        """Raises RunError in every process if the results of `digest` are not the same in all processes. `what`:
        the name of the compared values, for the message."""
        if self.alone:
            return
        digests = [""] * self.size
        dist.all_gather_object(digests, digest())
        others = [str(rank) for rank, found in enumerate(digests) if found != digests[0]]
        if others:
            raise RunError(f"rank {', '.join(others)} and rank 0 have different {what}: do the machines differ?")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Raises LostError if the connection to another process breaks in the `with` block."""
        try:
            yield
        except RuntimeError as error:
            if self.alone or not (isinstance(error, dist.DistError) or TRANSPORT in str(error)):
                raise
            self._failing = True
            reason = str(error).split("] ", 1)[-1].split(". ", 1)[0]
            raise LostError(
                f"rank {self.rank} of {self.size} lost the connection to another process: {reason}"
            ) from error

    def wait_for_end(self) -> None:
        """After the failure of another process, waits until the launcher stops this process, for at most
        LAUNCHER_WAIT_S."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._ended:
            time.sleep(LAUNCHER_WAIT_S)

    def _on_sigterm(self, *_: object) -> None:
        """Handles the signal with which the launcher stops the group. Raises LostError, unless this process already
        reports a failure."""
        self._ended = True
        if not self._failing:
            self._failing = True
            raise LostError(f"rank {self.rank} of {self.size} was stopped by its launcher")


ALONE = Group()
