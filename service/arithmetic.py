"""How many threads numpy multiplies with: one, unless the operator says otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from threadpoolctl import threadpool_limits

SAID_BY = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def spare_the_processors(environment: Mapping[str, str]) -> None:
    """Keeps BLAS to one thread, for the rest of the process, where none of the usual variables says how many.

    The matrices of a bundle's checks are small, and BLAS's threads wait for each other by spinning: on processors that
    requests need while a model is loaded beside another one, or a replica is started beside others.
    """
    if not any(environment.get(name) for name in SAID_BY):
        threadpool_limits(1, user_api="blas")
