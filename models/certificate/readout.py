"""Bounds the effect of float32 rounding in a residual network with one layer of an input-gated cell: s' = f s + b.

The bound compares two float32 runs of the same graphs: the run that answers, and the never-interrupted run. The loader
has checked that the graphs give equal bits for equal inputs (`models/parity.py`). After the receptive field of the
convolution blocks, both runs therefore read the same bits in their gates f, in b = (1 - f) z, and in the first layer's
input x.

**State.** Each run computes s' with one product and one sum, so its error is at most u f |s| + u |s'|, where u is the
unit roundoff. Let r bound the unit's states and f its gates. The states of the two runs then differ by f e + 2 u (1 +
f) r after a token if they differed by e before it. The effect of the cut shrinks by the gates, as in exact arithmetic.
The rest is at most E = 2 u (1 + f) r / (1 - f), unit by unit, after any number of tokens. Under the assumptions below,
this holds for every token sequence, also for a token that is repeated for ever.

**Gates and candidates.** Both runs read the same computed f and z, but these may be far from their values in exact
arithmetic: the LayerNorm below the cell amplifies rounding if its input nearly vanishes. The curve, the factor, and
the bound r are therefore those of computed values (`models/certificate/admissible.py`). Without convolution blocks,
the error of each token's pre-activations is bounded. Above convolution blocks, only the form of the cell is used: no
gate is above the cap, and no candidate is above 1.

**Readout.** `hidden` is computed from the state and x by two sums and up to two LayerNorms. Before a LayerNorm, the
vectors of the two runs differ by the effect of E and by the rounding of one evaluation in each run. A LayerNorm
multiplies this difference by 1 / sqrt(variance + epsilon). This factor is an output of the graphs (`norms`), so the
bound is evaluated at the answer's own LayerNorms (`Readout.between`). If the input of a LayerNorm nearly vanishes, the
bound of this answer is large. The two vectors at a LayerNorm may also differ by the effect of the cut. The
certificate's curve bounds this effect for all vectors, so the two bounds are added.

**Assumptions** about float32 arithmetic:

- The rounding errors of a product `W x + b` are, in the 2-norm over the rows, at most SUMS u times the 2-norm of the
  sums of magnitudes `|W| |x| + |b|`. This is not true of all matrices: the a priori bound has the number of terms
  instead of SUMS, and sums of equal terms come near it, because almost all their roundings have the same sign. So
  `roundoffs` tries each matrix on inputs that make its sums as regular as possible. If an error exceeds SUMS, the a
  priori bound is used. A matrix that is made to pass these trials may break the assumption. The loader
  compares the outputs with exact arithmetic.
- A LayerNorm subtracts the mean before it squares. Its error is at most that of an input that is NORM u |x| away, plus
  NORM u times the 2-norm of its result.
- exp, tanh and the sigmoid are within FUNCTION u of their values.

The errors of logits need no assumption (`service/engine/top1_proof.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import FUNCTION, NORM, ROOM, SUMS
from wane.models.certificate.admissible import UNIT_FLOAT32 as UNIT
from wane.models.certificate.cells.gated import SMALLEST_GATE
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, norm_above, spectral_norm
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.total_variation import head_diameter
from wane.models.manifest import Readout, StateError
from wane.models.weights import Weights, head_weight

SINGULAR_VECTORS = 4
TRIED_VALUES = np.linspace(0.5, 1.0, 8, endpoint=False) + 1 / 3000
"""The absolute values of the inputs that `roundoffs` tries: eight values without a common pattern of bits."""


def states_apart(layer: Layer) -> Vector:
    """Returns E, the bound of the difference of the states of two runs that have read the same tokens, by unit."""
    factor, reach = layer.bound.factor + UNIT * (FUNCTION + 2), layer.bound.reach[0] * ROOM
    if not factor < 1:
        return 2 * reach
    # A subnormal result has an absolute error, which the last term covers.
    apart: Vector = (2 * UNIT * (1 + factor) * reach + 2.0**-140) / (1 - factor) * ROOM
    return np.minimum(apart, 2 * reach)


def readout_of(architecture: Architecture, weights: Weights, layers: list[Layer]) -> Readout:
    """Returns the bounds for an architecture for which `has_readout` is true, and a contractive layer."""
    (layer,) = layers
    hidden, root = architecture.hidden, float(np.sqrt(architecture.hidden))

    def tensor(name: str) -> Matrix:
        return weights[name].astype(np.float64)

    reach = layer.bound.reach[0] * ROOM
    mix, box = tensor("layers.0.mix.weight"), states_apart(layer)
    magnitudes = norm_above(np.abs(mix) @ reach)
    # |x| is one of the magnitudes of the sum y = x + mix s. It is at most |y| + |mix s|.
    mixed, relative = UNIT * (roundoffs(mix, reach) + 2) * magnitudes, UNIT * (2 + NORM)
    slope, fed = _fed(tensor, root) if architecture.fading[0].feed_forward else (None, 0.0)
    gain, shift = np.abs(tensor("norm.weight")), norm_above(tensor("norm.bias"))
    widest = float(gain.max()) * root + shift
    head, bias = head_weight(weights).astype(np.float64), np.abs(weights["head.bias"].astype(np.float64))
    terms = (hidden + 2) * UNIT / (1 - (hidden + 2) * UNIT)
    logit = terms * float((np.linalg.norm(head, axis=1) * widest * ROOM + bias).max())
    diameter = max(head_diameter(head), 1e-30)
    return Readout(
        width=hidden,
        epsilon=min(architecture.norm_epsilon, float(np.float32(architecture.norm_epsilon))),
        gate=UNIT * (FUNCTION / SMALLEST_GATE + 2) * ROOM,
        name=architecture.layer_states(0)[0],
        states=StateError(box=float(box.max()), ball=norm_above(box)),
        state=min(spectral_norm(mix) * norm_above(box), furthest(mix, box)) * UP,
        mixed=mixed * UP,
        relative=relative * UP,
        slope=slope,
        fed=fed * UP,
        gain=float(gain.max()) * UP,
        top=(UNIT * (NORM + 3) * widest + 2 * logit / diameter) * UP,
    )


def _fed(tensor: Callable[[str], Matrix], root: float) -> tuple[float, float]:
    """Returns `slope` and `fed`. root: the greatest 2-norm of a normalised vector."""
    prefix = "layers.0.feed_forward"
    gain, shift = tensor(f"{prefix}_norm.weight"), np.abs(tensor(f"{prefix}_norm.bias"))
    into, bias = tensor(f"{prefix}_in.weight"), np.abs(tensor(f"{prefix}_in.bias"))
    out, out_bias = tensor(f"{prefix}_out.weight"), np.abs(tensor(f"{prefix}_out.bias"))
    inner, outer = spectral_norm(into * gain), spectral_norm(out)
    # |W| |gain n + shift| with |n|_2 <= root: by Cauchy-Schwarz in each row.
    sizes = (np.linalg.norm(into * gain, axis=1) * root + np.abs(into) @ shift + bias) * ROOM
    normalised = UNIT * (NORM + 3) * (inner * root + norm_above(np.abs(into) @ shift))
    wide = UNIT * roundoffs(into * gain, np.ones(into.shape[1])) * norm_above(sizes) + normalised
    # z, the inner units' values, is at most `sizes`, and at most `longest` in the 2-norm.
    longest = inner * root + norm_above(into @ tensor(f"{prefix}_norm.bias") + tensor(f"{prefix}_in.bias"))
    rows = np.minimum(np.linalg.norm(out, axis=1) * longest * ROOM, np.abs(out) @ sizes) + out_bias
    # The values of relu differ by D (W_1 (n - n~)) with a diagonal matrix D = (I + S) / 2, where |S| <= 1.
    slope = (spectral_norm(out @ (into * gain)) * ROOM + inner * outer) / 2
    return slope, outer * wide + UNIT * (roundoffs(out, sizes) + 1 + NORM) * norm_above(rows)


def roundoffs(weight: Matrix, sizes: Vector) -> float:
    """Returns the number c for the assumption that the errors of a float32 product with `weight` (R, I) are at most c
    units of roundoff: SUMS, or the a priori bound. `sizes`: the largest absolute values of the inputs, (I). Sums in
    order, of inputs whose entries have one absolute value or are proportional to `sizes`, must have errors of at most
    SUMS. The inputs' signs are equal, or those of the singular vectors with the largest values, which add up most."""
    return max(_tried(weight), _tried(weight * sizes))


def _tried(weight: Matrix) -> float:
    """Returns the number of `roundoffs` for inputs whose entries have one absolute value."""
    rows, terms = weight.astype(np.float32), weight.shape[1] + 2
    if terms <= SUMS:
        return float(terms)
    vectors = np.linalg.svd(weight, full_matrices=False)[2][:SINGULAR_VECTORS]
    for signs in (np.ones(weight.shape[1]), *np.where(vectors < 0, -1.0, 1.0)):
        for value in TRIED_VALUES:
            added = rows * (signs * value).astype(np.float32)
            off = np.cumsum(added, axis=1)[:, -1] - added.sum(axis=1, dtype=np.float64)
            if not np.linalg.norm(off) <= UNIT * SUMS * np.linalg.norm(np.abs(added).sum(axis=1, dtype=np.float64)):
                return float(terms)
    return SUMS


def furthest(matrix: Matrix, box: Vector) -> float:
    """Returns a bound of |matrix d|_2 over all d with |d_i| <= box_i."""
    gram = np.abs(matrix.T @ matrix)
    return float(np.sqrt(box @ gram @ box)) * (1 + 1e-9)
