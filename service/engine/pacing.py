"""What decides how a long sequence is cut into chunks, measured at warm-up: paces, and how soon the model forgets."""

from __future__ import annotations

from models.manifest import Manifest, Role
from service.engine import forgetting, paces
from service.engine.forgetting import Forgetting
from service.engine.paces import Pace
from service.engine.slab import Slab
from service.runners.runner import Runner


class Pacing:
    """One model's. Nothing is known before `measure`: until then every sequence is best run in order."""

    def __init__(self) -> None:
        self._paces: dict[Role, Pace] = {}
        self._forgetting = Forgetting(())

    def pace(self, role: Role) -> Pace:
        """Of `advance` or `scan`."""
        return self._paces.get(role, {})

    def warm_up(self, residual: float) -> int | None:
        """The fewest tokens after which no more than this was left of where a run came from."""
        return self._forgetting.warm_up(residual)

    def measure(self, runner: Runner, slab: Slab, manifest: Manifest, max_batch: int) -> None:
        """Blocks, and raises what the runner raises. To be called once every graph has run."""
        for role in ("advance", "scan"):
            self._paces[role] = paces.measure(role, runner, slab, manifest.vocabulary.eos_id, max_batch)
        self._forgetting = forgetting.measure(runner, slab, manifest.vocabulary.size)
