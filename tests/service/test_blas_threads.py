"""Tests of the number of threads that numpy's BLAS library starts. Each test starts a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wane.service.server import BLAS_VARIABLES

ASKED = """
import os
import sys
import numpy
from threadpoolctl import threadpool_info
from wane.service.server import spare_the_processors
if "spare" in sys.argv:
    spare_the_processors(os.environ)
print(*(found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"))
"""


def threads(*arguments: str, **said: str) -> set[str]:
    """Returns the distinct numbers of threads of the BLAS libraries in a new process. `said` has additional environment
    variables. If `spare` is among the arguments, the process first calls `spare_the_processors`."""
    environment = {name: value for name, value in os.environ.items() if name not in BLAS_VARIABLES}
    run = subprocess.run(
        [sys.executable, "-c", ASKED, *arguments], env=environment | said, check=True, capture_output=True, text=True
    )
    return set(run.stdout.split())


def test_numpy_uses_one_thread() -> None:
    assert threads("spare") == {"1"}


@pytest.mark.parametrize("name", BLAS_VARIABLES)
def test_an_operator_may_set_another_number(name: str) -> None:
    said = {name: "2"}
    assert threads("spare", **said) == threads(**said)
