"""The processes that train one run together, as `torchrun` starts them, and all that they tell each other.

Every process has the whole network and some lanes of the batch. The first (rank 0) reads and writes: the experiment,
the corpus and the run folder are its own, and the others are told what they hold. A process that is alone is in no
process group, and nothing is sent: what it computes is what it would without this module.
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
"""How long a process that did not fail itself waits for the launcher to end it; the one that failed is then named."""

TRANSPORT = "gloo/transport"
"""In the messages of gloo's broken connections, which are plain RuntimeErrors."""


class Group:
    """This process's place in the group: `rank` of `size`, `local_rank` of `local_size` on its machine."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self._failing = self._ended = False

    @classmethod
    def join(cls) -> Group:
        """The group that the environment tells of, as torchrun sets it; without one, `ALONE`.

        Tensors on the CPU go by gloo, those on CUDA devices by NCCL. Raises RunError where the others are not found.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return ALONE
        try:
            store, rank, size = next(rendezvous("env://"))
            # torchrun starts processes again with the store that has the addresses of those before
            attempt = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            dist.init_process_group(store=attempt, rank=rank, world_size=size)
        except (ValueError, RuntimeError) as error:
            raise RunError(f"the other processes were not found: {error}") from error
        local = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
        group = cls(rank, size, *local)
        signal.signal(signal.SIGTERM, group._on_sigterm)
        return group

    def leave(self) -> None:
        """Ends the process group, and its threads with it.

        Networks still refer to the group. If its threads were left running, one that gives up a tensor while the
        interpreter ends would abort the process.
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
        """What starts such a group: the words in front of `train`.

        After `--` torchrun leaves options alone: it would take `--run` for one of its own, cut short.
        """
        if self.alone:
            return ["wane"]
        nodes = ["--nnodes", str(self.size // self.local_size)] if self.size > self.local_size else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.local_size), "-m", "--", "wane"]

    # -- who does what

    def share(self, count: int) -> slice:
        """Which of `count` lanes are this process's: as many as any other's, or one more, or one less."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def parallel(self, network: nn.Module) -> nn.Module:
        """The network, its weights the first process's, its gradients after `backward` the mean over the processes."""
        return network if self.alone else DistributedDataParallel(network, gradient_as_bucket_view=True)

    def seed_noise(self, seed: int, step: int) -> None:
        """Dropout's masks of a step: others in every process, and the same ones again when a run goes on.

        A process that is alone goes on in its own sequence, which a checkpoint keeps.
        """
        if not self.alone:
            torch.manual_seed(int(np.random.SeedSequence([seed, step, self.rank]).generate_state(1)[0]))

    # -- what is told

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes, the same bits in each; float64."""
        if self.alone:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        totals: list[float] = sums.tolist()
        return totals

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process, in all; a TrainingError, likewise, is raised in all."""
        if self.alone:
            return make()
        told: list[T | TrainingError | None] = [None]
        if self.first:
            try:
                told = [make()]
            except TrainingError as error:
                told = [error]
        dist.broadcast_object_list(told)
        (found,) = told
        if isinstance(found, TrainingError):
            raise found
        return found  # type: ignore[return-value]  # None only where T is

    @contextmanager
    def together(self) -> Iterator[None]:
        """A TrainingError of one process in this block is raised in all, naming its rank; nothing may be sent in it."""
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
        for rank, told in enumerate(errors):
            if told is not None:
                raise told if rank == 0 else type(told)(f"rank {rank}: {told}")

    def gather(self, rows: list[Tensor]) -> list[Tensor]:
        """Tensors of this process's lanes, (lanes, ...): in the first process those of all lanes, on the CPU."""
        if self.alone:
            return rows
        parts: list[list[Tensor]] | None = [[]] * self.size if self.first else None
        dist.gather_object([tensor.detach().cpu() for tensor in rows], parts)
        return rows if parts is None else [torch.cat(whole) for whole in zip(*parts, strict=True)]

    def check_same(self, what: str, digest: Callable[[], str]) -> None:
        """Raises RunError in every process where one has another digest than the first."""
        if self.alone:
            return
        digests = [""] * self.size
        dist.all_gather_object(digests, digest())
        others = [str(rank) for rank, found in enumerate(digests) if found != digests[0]]
        if others:
            raise RunError(f"rank {', '.join(others)} has other {what} than rank 0: are the machines alike?")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """In this block a broken connection to another process is a LostError."""
        try:
            yield
        except RuntimeError as error:
            if self.alone or not (isinstance(error, dist.DistError) or TRANSPORT in str(error)):
                raise
            self._failing = True
            reason = str(error).split("] ", 1)[-1].split(". ", 1)[0]
            raise LostError(f"rank {self.rank} of {self.size} lost the connection to another: {reason}") from error

    def wait_for_end(self) -> None:
        """Leaves it to the launcher to end this process, because another one failed."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._ended:
            time.sleep(LAUNCHER_WAIT_S)

    def _on_sigterm(self, *_: object) -> None:
        """The launcher ends what is left of a group in which a process has failed: said, unless that is being said."""
        self._ended = True
        if not self._failing:
            self._failing = True
            raise LostError(f"rank {self.rank} of {self.size} was ended by its launcher")


ALONE = Group()
