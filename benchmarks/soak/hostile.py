"""Hostile clients. AT_ONCE hostile clients run concurrently. Each of them runs one attack after another until it is
stopped."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.soak.attacks import ATTACKS, WITH_KEYS, Attack, Target
from wane.service.auth.keys import make_key

AT_ONCE = 12
PAUSE_S = 0.2
QUOTA = 50
CUT_OFF_S = 60.0


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys. `visitor` is an admin key, for the clients that behave well. `hostile` is a key with a quota of
    QUOTA sessions. `file` is the path of the server's key file."""

    visitor: str
    hostile: str
    file: Path


@contextmanager
def keys() -> Iterator[Keys]:
    """Creates new keys and a temporary key file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        visitor, admin = make_key("visitor", ["scope=admin"])
        hostile, few = make_key("hostile", [f"sessions={QUOTA}"])
        file.write_text(f"{admin.line()}\n{few.line()}\n", encoding="utf-8")
        yield Keys(visitor, hostile, file)


@dataclass
class Hostiles:
    """The hostile clients. told: for each attack, the number of times that each answer was given. wrong: messages about
    answers that were not among the accepted ones, and about attacks that took too long."""

    target: Target
    told: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    async def attack(self, attack: Attack) -> None:
        """Runs an attack once and records its answers."""
        told = self.told.setdefault(attack.__name__, Counter())
        try:
            async with asyncio.timeout(CUT_OFF_S):
                async for answer, right in attack(self.target):
                    told[answer] += 1
                    if answer not in right:
                        self.wrong.append(f"{attack.__name__}: the answer was {answer}, expected {' or '.join(right)}")
        except OSError as error:
            told[type(error).__name__] += 1
        except TimeoutError:
            self.wrong.append(f"{attack.__name__} took more than {CUT_OFF_S:.0f} s")

    async def one(self) -> None:
        """Runs one client until cancelled."""
        attacks = [attack for attack in ATTACKS if self.target.key is not None or attack not in WITH_KEYS]
        while True:
            random.shuffle(attacks)
            for attack in attacks:
                await self.attack(attack)
                await asyncio.sleep(PAUSE_S * random.random())

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Runs the hostile clients while the `async with` block runs."""
        tasks = [asyncio.create_task(self.one()) for _ in range(AT_ONCE)]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
