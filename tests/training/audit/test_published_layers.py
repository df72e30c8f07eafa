"""Tests that minGRU and LRU layers in the layouts of their published implementations compute the papers' equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.training.audit.foreign_models import VOCABULARY, imported, logits_of, saved, some_tokens
from tests.training.corpora import write_events
from wane.cli import main
from wane.models.bundle import Bundle
from wane.models.certificate import certify
from wane.service.runners.onnx import OnnxRunner
from wane.training.audit.checkpoint import Checkpoint
from wane.training.audit.model import import_model
from wane.training.errors import ForeignError

TOKENS = some_tokens()


class MinGru(nn.Module):
    """A minGRU in log-space, with `to_out` if it is expanded."""

    def __init__(self, width: int, expansion: float = 1.0) -> None:
        super().__init__()
        inner = int(width * expansion)
        self.to_hidden_and_gate = nn.Linear(width, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, width, bias=False) if expansion != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, B, D)."""
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
        out: Tensor = self.to_out(mixed(gate, positive(hidden)))
        return out


class Listing(nn.Module):
    """The minGRU of the paper's listings: in log-space, or with the pre-activations as candidates."""

    def __init__(self, width: int, units: int, *, log_space: bool) -> None:
        super().__init__()
        self.linear_z, self.linear_h = nn.Linear(width, units), nn.Linear(width, units)
        self.log_space = log_space

    def forward(self, x: Tensor) -> Tensor:
        candidate = self.linear_h(x)
        return mixed(self.linear_z(x), positive(candidate) if self.log_space else candidate)


def positive(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, x.sigmoid())


def mixed(gate: Tensor, candidate: Tensor) -> Tensor:
    """Returns the states of `h' = (1 - z) h + z candidate` after every token, z = sigmoid(gate)."""
    h, found = torch.zeros_like(candidate[0]), []
    for k, value in zip(gate, candidate, strict=True):
        h = torch.lerp(h, value, torch.sigmoid(k))
        found.append(h)
    return torch.stack(found)


class Lru(nn.Module):
    """The LRU. `parts`: B and C as real and imaginary parts. `direct`: D as a vector, as a matrix, or none."""

    def __init__(self, width: int, outputs: int, *, parts: bool, direct: str) -> None:
        super().__init__()
        units, tensors = 4, dict[str, Tensor]()
        radius = torch.rand(units) * 0.5 + 0.3
        tensors |= {"nu_log": torch.log(-torch.log(radius)), "theta_log": torch.log(torch.rand(units) * 3)}
        tensors["gamma_log"] = 0.5 * torch.log(1 - radius**2)
        for name, rows, columns in (("B", units, width), ("C", outputs, units)):
            real, imaginary = torch.randn(rows, columns) / 2, torch.randn(rows, columns) / 2
            if parts:
                tensors |= {f"{name}_re": real, f"{name}_im": imaginary}
            else:
                tensors[name] = torch.complex(real, imaginary)
        if direct:
            tensors["D"] = torch.randn(outputs) if direct == "vector" else torch.randn(outputs, width)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: Tensor) -> Tensor:
        b, c = (getattr(self, name) if hasattr(self, name) else self._joined(name) for name in "BC")
        nu, theta, gamma = (self.get_parameter(f"{name}_log") for name in ("nu", "theta", "gamma"))
        decay = torch.polar(torch.exp(-torch.exp(nu)), torch.exp(theta))
        s, found = torch.zeros(x.shape[1], len(decay), dtype=torch.complex64), []
        for row in x:
            s = decay * s + row.to(torch.complex64) @ (torch.exp(gamma)[:, None] * b).T
            y = (s @ c.T).real
            if hasattr(self, "D"):
                y = y + (self.D * row if self.D.ndim == 1 else row @ self.D.T)
            found.append(y)
        return torch.stack(found)

    def _joined(self, name: str) -> Tensor:
        return torch.complex(getattr(self, f"{name}_re"), getattr(self, f"{name}_im"))


class Model(nn.Module):
    """A language model of an embedding, such layers and a head."""

    def __init__(self, *layers: nn.Module, width: int = 6, top: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(top, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def agrees(path: Path, model: Model, **options: Any) -> Any:
    """Saves and imports a model, and compares its logits with the model's own. Returns the imported model."""
    found = imported(saved(path / "model.pt", model.state_dict()), **options)
    with torch.no_grad():
        assert (logits_of(found, TOKENS) - model(TOKENS)).abs().max() < 1e-5
    return found


@pytest.mark.parametrize("expansion", [1.0, 1.5])
@pytest.mark.parametrize("count", [1, 2])
def test_min_gru_pytorch_is_imported_in_log_space(tmp_path: Path, expansion: float, count: int) -> None:
    torch.manual_seed(3)
    found = agrees(tmp_path, Model(*(MinGru(6, expansion) for _ in range(count))))
    assert [(layer.kind, layer.candidate) for layer in found.architecture.layers] == [("gated", "positive")] * count
    assert any("in log-space" in assumption for assumption in found.assumptions)
    certificate = certify(found.architecture, found.weights, 256, None)
    assert certificate.certified, certificate.reason


@pytest.mark.parametrize("log_space", [False, True])
def test_the_papers_listings_are_imported_with_the_option(tmp_path: Path, log_space: bool) -> None:
    torch.manual_seed(3)
    model = Model(Listing(6, 5, log_space=log_space), top=5)
    with pytest.raises(ForeignError, match=r"--nonlinearity identity.*--nonlinearity positive.*does not record which"):
        imported(saved(tmp_path / "model.pt", model.state_dict()))
    agrees(tmp_path, model, nonlinearity="positive" if log_space else "identity")


@pytest.mark.parametrize("direct", ["", "vector", "matrix"])
@pytest.mark.parametrize("parts", [False, True], ids=["complex", "real and imaginary parts"])
def test_the_lru_is_imported(tmp_path: Path, parts: bool, direct: str) -> None:
    torch.manual_seed(4)
    outputs = 7 if direct == "matrix" else 6
    layers = [Lru(6, 6, parts=parts, direct=direct), Lru(6, outputs, parts=parts, direct=direct)]
    found = agrees(tmp_path, Model(*layers, top=outputs))
    assert [layer.kind for layer in found.architecture.layers] == ["lru", "lru"]
    assert found.architecture.layers[0].units == (14 if direct else 8)
    certificate = certify(found.architecture, found.weights, 256, None)
    assert certificate.certified, certificate.reason


def test_an_lru_of_a_safetensors_file_is_imported(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = Model(Lru(6, 6, parts=True, direct="vector"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        assert (logits_of(imported(tmp_path / "model.safetensors"), TOKENS) - model(TOKENS)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["minGRU", "LRU"])
def test_the_certificates_bounds_hold_for_random_texts(kind: str) -> None:
    torch.manual_seed(6)
    layer: nn.Module = MinGru(6, 1.5) if kind == "minGRU" else Lru(6, 6, parts=False, direct="vector")
    tensors = {name: tensor.detach() for name, tensor in Model(layer, width=6).state_dict().items()}
    found = import_model(Checkpoint(Path("model.pt"), "", "", tensors))
    bounds = certify(found.architecture, found.weights, 32, None).error_bound
    tokens = torch.randint(VOCABULARY, (100, 64))
    whole = logits_of(found, tokens)[-1].softmax(-1)
    nearest = 0.0
    for k in (1, 2, 4, 8, 16):
        apart = float((logits_of(found, tokens[-k:])[-1].softmax(-1) - whole).abs().sum(-1).max()) / 2
        assert apart <= bounds[k - 1]
        nearest = max(nearest, apart / bounds[k - 1])
    assert nearest > 1e-3  # the texts differ


@pytest.mark.parametrize("kind", ["minGRU", "LRU"])
def test_the_exported_bundle_predicts_like_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    model = Model(MinGru(6, 1.5) if kind == "minGRU" else Lru(6, 6, parts=True, direct="vector"))
    names = ["<eos>", "<unk>", *"abcdefghijk"]
    saved(tmp_path / "model.pt", model.state_dict())
    (tmp_path / "names.txt").write_text("\n".join(names))
    write_events(tmp_path / "events.jsonl", [[names[index] for index in some_tokens()[:, 0]]] * 30)
    command = ["audit", "model.pt", "--data", "events.jsonl", "--vocabulary", "names.txt", "--positions", "20"]
    assert main([*command, "--threads", "1", "--max-window", "16", "--export", "bundles"]) == 0
    bundle = Bundle.read(tmp_path / "bundles" / "model")
    outputs = OnnxRunner(bundle, "cpu", threads=1).run(
        "window", {"tokens": TOKENS[:, :1].T.numpy(), "lengths": np.array([len(TOKENS)])}
    )
    with torch.no_grad():
        assert np.abs(outputs["logits"] - model(TOKENS[:, :1])[-1].numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("layers.0.norm.gamma", (6,), r"minGRU layers, the model has RMSNorm \(gamma\).*LayerNorm and ReLU instead"),
        ("layers.0.conv.net.0.weight", (6, 1, 3), "has a convolution"),
        ("layers.0.out1.weight", (6, 6), r"a gated linear unit \(out1, out2\)"),
        (
            "layers.0.other",
            (6,),
            r"tensors that are not part of the embedding, recurrent layers or head: layers.0.other",
        ),
    ],
)
def test_the_published_blocks_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...], reason: str
) -> None:
    tensors = Model(MinGru(6)).state_dict() | {name: torch.zeros(shape)}
    with pytest.raises(ForeignError, match=reason):
        imported(saved(tmp_path / "model.pt", tensors))


def changed(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    tensors = Model(Lru(6, 6, parts=True, direct="vector")).state_dict()
    del tensors[f"layers.0.{name}"]
    return tensors if tensor is None else tensors | {f"layers.0.{name}": tensor}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (changed("gamma_log", None), "the layer has no layers.0.gamma_log"),
        (changed("theta_log", torch.zeros(3)), r"theta_log has shape \[3\], expected \[4\]"),
        (changed("C_re", torch.zeros(6, 5)), "C_re and layers.0.C_im have shapes"),
        (changed("D", torch.zeros(5)), r"D has shape \[5\], expected \[6\] or \[6, 6\]"),
        (changed("B_im", torch.full((4, 6), float("nan"))), "B_im holds a value that is not finite"),
    ],
)
def test_a_damaged_lru_is_refused(tmp_path: Path, tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ForeignError, match=reason):
        imported(saved(tmp_path / "model.pt", tensors))
