"""Part 2: one long sequence, in parallel and in order, and batches of windows. Needs torch.

`in order` is one call of torch's LSTM, which is cuDNN's on a GPU, over the whole sequence. `parallel` is the method of
the service (`service/chunked/`): the sequence is cut into chunks that run side by side as one batch, and each chunk
first reads the WARM_UP tokens before it. The residual is the largest difference between the state that a chunk starts
from and the last state of the chunk before. The number of tokens of the warm-up doubles until the residual is at most
RESIDUAL. The LSTM forgets: its forget gates are near 0.9, as those of a contractive model. `gated` is the scan of the
cell `gated` over the whole sequence at once (`models/parallel_scan.py`), which has no residual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.gpu.chip import tf32
from benchmarks.gpu.part import Figures, Part, spread, timed
from wane.models.parallel_scan import linear_recurrence

RESIDUAL = 1e-5
FORGET = 0.9
WARM_UP, LONGEST_WARM_UP = 32, 1024


def forgetting_lstm(hidden: int, device: str) -> nn.LSTM:
    """Returns an LSTM with random weights whose forget gates are near FORGET."""
    torch.manual_seed(0)
    lstm = nn.LSTM(hidden, hidden)
    with torch.no_grad():
        weights = dict(lstm.named_parameters())
        weights["weight_hh_l0"].mul_(0.5)
        weights["bias_ih_l0"][hidden : 2 * hidden] = math.log(FORGET / (1 - FORGET))
        weights["bias_hh_l0"][hidden : 2 * hidden] = 0
    return lstm.to(device).eval()


def in_chunks(lstm: nn.LSTM, x: Tensor, chunks: int, warm_up: int) -> tuple[Tensor, float]:
    """Runs x, (T, H), as `chunks` parallel chunks. Returns the outputs (T, H) and the residual. The first chunk starts
    from the zero state, so its warm-up has no effect."""
    length = len(x) // chunks
    before = torch.cat([x.new_zeros(warm_up, x.shape[1]), x[: len(x) - length]])
    starts = before.unfold(0, warm_up, length)[:chunks].permute(2, 0, 1)
    _, (h, c) = lstm(starts.contiguous())
    h[:, 0], c[:, 0] = 0, 0
    y, (last_h, last_c) = lstm(x.view(chunks, length, -1).transpose(0, 1).contiguous(), (h, c))
    apart = torch.stack([(last_h[:, :-1] - h[:, 1:]).abs().max(), (last_c[:, :-1] - c[:, 1:]).abs().max()])
    return y.transpose(0, 1).reshape(len(x), -1), float(apart.max())


def run(part: Part) -> None:
    """Measures part 2."""
    device = part.device
    tokens, hidden = (2**13, 32) if part.small else (2**20, 256)
    part.keep(tokens=tokens, hidden=hidden, reach_residual=RESIDUAL)
    with torch.no_grad(), tf32(False):
        lstm = forgetting_lstm(hidden, device)
        x = torch.randn(tokens, hidden, device=device)
        best = _parallel(part, lstm, x)
        _gated(part, x)
        _in_order(part, lstm, x, best)
        _windows(part, lstm)


def _parallel(part: Part, lstm: nn.LSTM, x: Tensor) -> float:
    """Measures several numbers of chunks. Returns the shortest median time of those with a residual of at most
    RESIDUAL."""
    best = math.inf
    for chunks in (8, 32) if part.small else (1024, 2048, 4096, 8192, 16384):
        warm_up = WARM_UP
        while True:
            _, residual = in_chunks(lstm, x, chunks, warm_up)
            if residual <= RESIDUAL or warm_up >= LONGEST_WARM_UP:
                break
            warm_up *= 2
        taken = spread(timed(part.device, lambda n=chunks, w=warm_up: in_chunks(lstm, x, n, w), 5, warm=1))  # type: ignore[misc]
        part.add("parallel", {"chunks": chunks, "warm_up": warm_up, "residual": residual, "seconds": taken})
        part.say(f"{chunks:,} chunks: {1e3 * taken['median']:,.1f} ms, residual {residual:.1e}")
        if residual <= RESIDUAL:
            best = min(best, taken["median"])
    return best


def _gated(part: Part, x: Tensor) -> None:
    gate, inflow, start = 0.9 * torch.sigmoid(x), torch.tanh(x), x.new_zeros(x.shape[1])
    taken = spread(timed(part.device, lambda: linear_recurrence(gate, inflow, start), 5))
    part.keep(gated={"seconds": taken})
    part.say(f"scan of gated {1e3 * taken['median']:,.2f} ms")


def _in_order(part: Part, lstm: nn.LSTM, x: Tensor, best: float) -> None:
    """Measures the LSTM in order over a part of the sequence that fits in the time, and over all of it if it fits."""
    found: Figures = {}
    length = len(x) // 16
    while length <= len(x):
        piece = x[:length].unsqueeze(1)
        repeats = 3 if length == len(x) // 16 else 1
        try:
            taken = timed(part.device, lambda piece=piece: lstm(piece), repeats, warm=1 if repeats > 1 else 0)  # type: ignore[misc]
        except RuntimeError as error:  # cuDNN refuses the length, or the memory does not suffice
            part.keep(in_order=found | {"error": str(error).splitlines()[0][:300]})
            break
        whole = spread(second * len(x) / length for second in taken)
        found = {"tokens": length, "extrapolated": length < len(x), "seconds": whole}
        part.keep(in_order=found)
        if part.left_s < 2.5 * 16 * min(taken):
            break
        length *= 16
    if math.isfinite(best) and found:
        part.keep(times_in_order=found["seconds"]["median"] / best)
        part.say(
            f"in order {found['seconds']['median']:,.2f} s, {part.record['times_in_order']:,.0f} times the parallel"
        )


def _windows(part: Part, lstm: nn.LSTM) -> None:
    """Measures batches of windows: the scan of gated against the LSTM, each from the zero state."""
    hidden = lstm.hidden_size
    for batch in (1, 16) if part.small else (1, 64, 1024):
        for window in (16, 64, 256):
            if part.left_s < 3:
                return
            x = torch.randn(window, batch, hidden, device=part.device)
            gate, inflow, start = 0.9 * torch.sigmoid(x), torch.tanh(x), x.new_zeros(batch, hidden)
            part.add(
                "windows",
                {
                    "batch": batch,
                    "window": window,
                    "lstm_s": spread(timed(part.device, lambda x=x: lstm(x), 5)),  # type: ignore[misc]
                    "gated_s": spread(
                        timed(part.device, lambda g=gate, i=inflow, s=start: linear_recurrence(g, i, s), 5)  # type: ignore[misc]
                    ),
                },
            )
