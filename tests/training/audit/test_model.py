from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from tests.training.audit.foreign_models import (
    TORCH_CELLS,
    VOCABULARY,
    AwdLstm,
    Gru4Rec,
    OfCells,
    Plain,
    imported,
    logits_of,
    saved,
    some_tokens,
)
from wane.models.layer_registry import Kind
from wane.training.audit.check import check_logits
from wane.training.audit.checkpoint import read_checkpoint
from wane.training.audit.tensor_names import parse_mapping
from wane.training.errors import ForeignError

Tensors = dict[str, Tensor]


def assert_same(path: Path, module: nn.Module, **options: Any) -> tuple[str, ...]:
    """Asserts that the imported model computes the module's logits. Returns the notes of the import."""
    model, tokens = imported(path, **options), some_tokens()
    with torch.no_grad():
        assert torch.allclose(logits_of(model, tokens), module(tokens), atol=1e-6)
    return model.notes


@pytest.mark.parametrize("cell", TORCH_CELLS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_an_imported_checkpoint_computes_the_logits_of_torch(
    tmp_path: Path, cell: Kind, layers: int, bias: bool, tied: bool
) -> None:
    module = Plain(cell, num_layers=layers, bias=bias, tied=tied, head_bias=bias)
    path = saved(tmp_path / "model.pt", module.state_dict())
    options = {"nonlinearity": "relu"} if cell == "rnn_relu" else {}
    notes = " ".join(assert_same(path, module, **options))
    architecture = imported(path, **options).architecture
    assert (architecture.family, len(architecture.layers), architecture.tied) == (cell, layers, tied)
    assert ("biases missing from the file are zeros" in notes) is not bias
    assert ("the head has no bias" in notes) is not bias
    assert ("tied" in notes) is tied
    assert ("nonlinearity" in notes) is (cell == "rnn_tanh")


@pytest.mark.parametrize(
    "names",
    [
        ("encoder", "rnn", "decoder"),
        ("embedding", "lstm", "linear"),
        ("embed", "gru", "head"),
        ("wte", "core", "lm_head"),
        ("word_embeddings", "backbone", "classifier"),
        ("tok_emb", "lstm", "out"),
        ("EMBEDDING", "LSTM", "FC"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("width", [6, 5])
def test_common_names_are_recognised(tmp_path: Path, names: tuple[str, str, str], width: int) -> None:
    module = Plain(names=names, width=width)
    assert assert_same(saved(tmp_path / "model.pt", module.state_dict()), module) == ()


def test_other_names_are_recognised_by_shape_or_mapped(tmp_path: Path) -> None:
    module = Plain(names=("first", "middle", "last"), width=5)
    notes = assert_same(saved(tmp_path / "shapes.pt", module.state_dict()), module)
    assert "first.weight is assumed to be the embedding, by its shape" in notes
    assert "last.weight is assumed to be the head, by its shape" in notes

    alike = Plain(names=("first", "middle", "last"))  # of the two matrices of equal shape, only the head has a bias
    path = saved(tmp_path / "alike.pt", alike.state_dict())
    assert assert_same(path, alike) == notes
    mapping = parse_mapping(["embedding=first.weight", "head=last.weight", "head.bias=last.bias"])
    assert assert_same(path, alike, mapping=mapping) == ()

    unclear = Plain(names=("first", "middle", "last"), head_bias=False)
    path = saved(tmp_path / "unclear.pt", unclear.state_dict())
    with pytest.raises(ForeignError, match=r"several matrices may be the embedding: first.weight \[13, 6\]; last"):
        imported(path)
    mapping = parse_mapping(["embedding=first.weight"])
    assert_same(path, unclear, mapping=mapping)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensors: {"state_dict": tensors, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}}},
        lambda tensors: {"state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()}},
        lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()},
        lambda tensors: {f"_orig_mod.net.{name}": tensor for name, tensor in tensors.items()},
        lambda tensors: {"a": {"model": tensors}, "losses": [1.0, 2.0]},
        lambda tensors: {"model_state_dict": tensors, "args": {"lr": 0.1, "cell": "lstm"}},
        lambda tensors: {name: nn.Parameter(tensor) for name, tensor in tensors.items()},
        lambda tensors: {
            part: {name[len(part) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(part)}
            for part in ("embedding", "rnn", "fc")
        },
    ],
    ids=["state_dict", "lightning", "data parallel", "compiled", "nested", "with arguments", "parameters", "by module"],
)
def test_common_wrappers_of_a_checkpoint_are_removed(tmp_path: Path, wrap: Callable[[Tensors], object]) -> None:
    module = Plain()
    assert_same(saved(tmp_path / "model.ckpt", wrap(dict(module.state_dict()))), module)


def test_the_old_format_of_torch_save_is_read(tmp_path: Path) -> None:
    module = Plain()
    torch.save({"model": module.state_dict()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(tmp_path / "old.pt", module)


@pytest.mark.parametrize("tied", [True, False])
def test_safetensors_with_tied_tensors_are_read(tmp_path: Path, tied: bool) -> None:
    module = Plain(tied=tied)
    save_model(module, str(tmp_path / "model.safetensors"))
    assert_same(tmp_path / "model.safetensors", module)


@pytest.mark.parametrize("kept", ["embedding.weight", "fc.weight"])
def test_tied_weights_may_be_saved_under_either_name(tmp_path: Path, kept: str) -> None:
    module = Plain(tied=True)
    left_out = {"embedding.weight", "fc.weight"} - {kept}
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name not in left_out}
    save_file(tensors, tmp_path / "model.safetensors")
    assert any("tied" in note for note in assert_same(tmp_path / "model.safetensors", module))


def test_a_stack_of_cells_is_read_in_numeric_order(tmp_path: Path) -> None:
    module = OfCells((6,) * 11)  # cells.10 is the layer after cells.9, not the layer after cells.1
    assert_same(saved(tmp_path / "model.pt", module.state_dict()), module)


@pytest.mark.parametrize("sizes", [(6, 9, 6), (7, 5), (4, 4, 8)], ids=repr)
def test_layers_of_different_sizes_are_padded_without_changing_the_output(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    module = OfCells(sizes)
    notes = assert_same(saved(tmp_path / "model.pt", module.state_dict()), module)
    assert any(f"padded to {max(sizes)}" in note for note in notes)


def test_inputs_without_an_embedding_are_one_hot(tmp_path: Path) -> None:
    rnn, head = nn.GRU(VOCABULARY, 5), nn.Linear(5, VOCABULARY)
    module = nn.ModuleDict({"rnn": rnn, "head": head})
    model = imported(saved(tmp_path / "model.pt", module.state_dict()))
    tokens = some_tokens()
    with torch.no_grad():
        expected = head(rnn(nn.functional.one_hot(tokens, VOCABULARY).float())[0])
        assert torch.allclose(logits_of(model, tokens), expected, atol=1e-6)
    assert any("one-hot" in note for note in model.notes)


@pytest.mark.parametrize("events", [13, 40])
def test_a_layer_over_one_hot_input_is_read_by_its_rows(tmp_path: Path, events: int) -> None:
    module = Gru4Rec(events=events).eval()
    model = imported(saved(tmp_path / "model.pt", module.state_dict()))
    assert model.architecture.vocabulary_size == events
    assert model.architecture.embedding == min(events, 3 * 5)
    tokens = torch.randint(events, (9, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(logits_of(model, tokens), module(tokens), atol=1e-6)


@pytest.mark.parametrize(
    ("names", "bias", "width"),
    [
        *itertools.product((("encoder", "decoder"), ("fc1", "fc2"), ("first", "last")), (True, False), (5, 6)),
        (("encoder", "decoder"), True, VOCABULARY),  # a square matrix: it has a bias, so it is not an embedding table
    ],
)
def test_a_linear_over_one_hot_input_becomes_an_embedding(
    tmp_path: Path, names: tuple[str, str], bias: bool, width: int
) -> None:
    module = Gru4Rec(width, names=names, bias=bias)
    notes = assert_same(saved(tmp_path / "model.pt", module.state_dict()), module)
    assert any(
        f"{names[0]}.weight is assumed to be the weight of a Linear over one-hot input" in note for note in notes
    )
    assert any(f"plus {names[0]}.bias" in note for note in notes) is bias


def test_the_tensors_of_a_linear_over_one_hot_input_are_named_in_the_report(tmp_path: Path) -> None:
    model = imported(saved(tmp_path / "model.pt", Gru4Rec(6).state_dict()))
    assert model.tensors["embedding.weight"] == "fc1.weight.T + fc1.bias"


def test_a_projection_before_the_head_is_refused_by_name_or_taken_on_request(tmp_path: Path) -> None:
    module = Gru4Rec(6, projected=4, names=("encoder", "decoder"))
    path = saved(tmp_path / "model.pt", module.state_dict())
    with pytest.raises(
        ForeignError, match=r"between.weight \[4, 5\] has the shape of a projection .* activation"
    ) as why:
        imported(path)
    assert "decoder.weight [13, 4]" in str(why.value) and "--map projection=between.weight" in str(why.value)
    notes = assert_same(path, module, mapping=parse_mapping(["projection=between.weight"]))
    assert any("between.weight is a projection without an activation" in note for note in notes)
    model = imported(path, mapping=parse_mapping(["projection=between.weight"]))
    assert model.tensors["head.weight"] == "decoder.weight @ between.weight"
    assert model.tensors["head.bias"] == "decoder.bias + decoder.weight @ between.bias"


@pytest.mark.parametrize(
    ("names", "width"),
    [(("encoder", "decoder"), 5), (("embed", "proj"), 5), (("fc1", "fc2"), 4), (("encoder", "proj"), 6)],
    ids=repr,
)
def test_a_projection_of_any_width_and_name_is_refused_as_one(
    tmp_path: Path, names: tuple[str, str], width: int
) -> None:
    module = Gru4Rec(6, projected=width, names=names)
    with pytest.raises(ForeignError, match=rf"between.weight \[{width}, 5\] has the shape of a projection"):
        imported(saved(tmp_path / "model.pt", module.state_dict()))


def test_a_projection_to_a_tied_head_is_taken_on_request(tmp_path: Path) -> None:
    module = Plain("gru", width=4, hidden=6)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("fc")}
    projection = nn.Linear(6, 4)
    tensors |= {f"proj.{name}": tensor for name, tensor in projection.state_dict().items()}
    path = saved(tmp_path / "model.pt", tensors)
    with pytest.raises(ForeignError, match=r"proj.weight \[4, 6\] .* the head embedding.weight \[13, 4\]"):
        imported(path)
    tokens = some_tokens()
    with torch.no_grad():
        hidden = module.rnn(module.embedding(tokens))[0]  # type: ignore[operator]
        expected = projection(hidden) @ module.embedding.weight.T  # type: ignore[union-attr]
    model = imported(path, mapping=parse_mapping(["projection=proj.weight"]))
    assert torch.allclose(logits_of(model, tokens), expected, atol=1e-5)


@pytest.mark.parametrize("after_training", [False, True])
def test_the_raw_matrices_of_awd_lstm_are_read(tmp_path: Path, after_training: bool) -> None:
    module = AwdLstm().eval()
    tensors = dict(module.state_dict())
    assert "rnns.0.weight_hh_l0_raw" in tensors and "rnns.0.module.weight_ih_l0" in tensors
    if after_training:  # some versions of awd-lstm also save the copy to which dropout was applied
        for layer in range(3):
            raw = tensors[f"rnns.{layer}.weight_hh_l0_raw"]
            tensors[f"rnns.{layer}.module.weight_hh_l0"] = nn.functional.dropout(raw, 0.5)
    notes = assert_same(saved(tmp_path / "model.pt", tensors), module)
    copies = [note for note in notes if "is assumed to be rnns" in note and "after dropout" in note]
    assert len(copies) == (3 if after_training else 0)


def test_a_map_of_one_tensor_keeps_the_others(tmp_path: Path) -> None:
    module = Plain(num_layers=2)
    tensors = dict(module.state_dict())
    tensors["strange"] = tensors.pop("rnn.weight_hh_l1")
    path = saved(tmp_path / "model.pt", tensors)
    with pytest.raises(ForeignError, match="has no weight_hh"):
        imported(path)
    assert assert_same(path, module, mapping=parse_mapping(["layers.1.weight_hh=strange"])) == ()
    tensors["odd.weight_ih"] = tensors.pop("rnn.weight_ih_l0")
    saved(path, tensors)
    mapping = parse_mapping(["layers.1.weight_hh=strange", "layers.0.weight_ih=odd.weight_ih"])
    assert assert_same(path, module, mapping=mapping) == ()


def test_a_mapped_tensor_replaces_another_which_must_be_ignored(tmp_path: Path) -> None:
    module = Plain()
    tensors = dict(module.state_dict()) | {"old": torch.zeros(24, 6)}
    tensors["old"], tensors["rnn.weight_hh_l0"] = tensors["rnn.weight_hh_l0"], tensors["old"]
    path = saved(tmp_path / "model.pt", tensors)
    mapping = parse_mapping(["layers.0.weight_hh=old"])
    with pytest.raises(ForeignError, match=r"not part of .*: rnn.weight_hh_l0 \[24, 6\]"):
        imported(path, mapping=mapping)
    assert_same(path, module, mapping=mapping, ignore=["rnn.weight_hh_l0"])


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        (torch.float16, "float16 tensors were converted, exactly, to float32"),
        (torch.bfloat16, "bfloat16 tensors were converted, exactly, to float32"),
        (torch.float64, "float64 tensors were rounded to float32"),
    ],
)
def test_other_floats_become_float32_with_a_note(tmp_path: Path, dtype: torch.dtype, note: str) -> None:
    module = Plain().to(dtype)
    path = saved(tmp_path / "model.pt", module.state_dict())
    assert note in assert_same(path, module.float())


def test_modules_without_numbers_can_be_mapped_to_layers(tmp_path: Path) -> None:
    lower, upper = Plain(names=("embed", "lower", "x")), Plain(names=("y", "upper", "out"))
    kept = {name: tensor for name, tensor in lower.state_dict().items() if not name.startswith("x.")}
    kept |= {name: tensor for name, tensor in upper.state_dict().items() if not name.startswith("y.")}
    path = saved(tmp_path / "model.pt", kept)
    with pytest.raises(ForeignError, match=r"several recurrent modules \(lower, upper\)"):
        imported(path)
    tokens = some_tokens()
    with torch.no_grad():
        x = upper.upper(lower.lower(lower.embed(tokens))[0])[0]  # type: ignore[operator]
        expected = upper.out(x)  # type: ignore[operator]
    by_module = parse_mapping(["layers.1=upper", "layers.0=lower"])
    assert torch.allclose(logits_of(imported(path, mapping=by_module), tokens), expected, atol=1e-6)
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    by_part = parse_mapping(
        [f"layers.{n}.{part}={name}.{part}_l0" for n, name in enumerate(("lower", "upper")) for part in parts]
    )
    assert torch.allclose(logits_of(imported(path, mapping=by_part), tokens), expected, atol=1e-6)


def test_one_of_several_models_can_be_chosen(tmp_path: Path) -> None:
    module, average = Plain("gru"), Plain("gru", width=5)
    path = saved(tmp_path / "model.pt", {"run": {"model": module.state_dict(), "ema": average.state_dict()}})
    with pytest.raises(ForeignError, match=r"several models: run.model, run.ema; choose one with --state-dict KEY"):
        read_checkpoint(path)
    assert set(read_checkpoint(path, "run.ema").tensors) == set(average.state_dict())
    with pytest.raises(ForeignError, match="there is no dictionary 'none'; known: model, ema"):
        read_checkpoint(path, "run.none")


def test_tensors_outside_the_model_must_be_ignored_explicitly(tmp_path: Path) -> None:
    module = Plain()
    path = saved(
        tmp_path / "model.pt", {**module.state_dict(), "value.weight": torch.ones(1, 6), "step": torch.ones(())}
    )
    with pytest.raises(
        ForeignError, match=r"tensors that are not part of .*: step \[\]; value.weight \[1, 6\].*--ignore"
    ):
        imported(path)
    notes = assert_same(path, module, ignore=["step", "value.*"])
    assert notes == ("ignored because of --ignore: step, value.weight",)


def changed(**changes: Tensor | None) -> Tensors:
    """Returns the tensors of a checkpoint with some tensors replaced. Each keyword argument is the name of a tensor, in
    which `__` stands for a dot, and its new value; None removes the tensor."""
    tensors = dict(Plain(num_layers=2).state_dict())
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (Plain(bidirectional=True).state_dict(), r"rnn.bias_hh_l0_reverse: the layer is bidirectional"),
        (Plain(proj_size=3).state_dict(), r"rnn.weight_hr_l0: the LSTM projects its output \(proj_size\)"),
        (nn.Linear(3, 3).state_dict(), r"no recurrent layer: .* Found: bias, weight"),
        (changed(rnn__weight_ih_l1=None), r"layer 1 \(.*\) has no weight_ih"),
        (
            changed(rnn__weight_hh_l0=torch.ones(12, 6)),
            r"rnn.weight_hh_l0 has shape \[12, 6\]: 6 units need 6 \(RNN\), 18 \(GRU\), 24 \(LSTM\) rows",
        ),
        (
            changed(rnn__weight_ih_l1=torch.ones(24, 5)),
            r"rnn.weight_ih_l1 has shape \[24, 5\], expected \[24, 6\] .* because the layer below has 6 units",
        ),
        (changed(rnn__bias_hh_l0=torch.ones(6)), r"rnn.bias_hh_l0 has shape \[6\], expected \[24\]"),
        (
            changed(rnn__weight_hh_l1=torch.ones(18, 6), rnn__weight_ih_l1=torch.ones(18, 6), rnn__bias_ih_l1=None)
            | {"rnn.bias_hh_l1": torch.ones(18)},
            r"layers of different cells \(lstm, gru\)",
        ),
        (changed(fc__weight=torch.ones(12, 6)), r"fc.weight has shape \[12, 6\], expected \[13, 6\]"),
        (changed(fc__bias=torch.ones(12)), r"fc.bias has shape \[12\], expected \[13\]"),
        (changed(embedding__weight=torch.ones(13, 5)), r"embedding.weight has shape \[13, 5\], expected \[13, 6\]"),
        (
            changed(rnn__weight_hh_l0=torch.full((24, 6), torch.nan)),
            r"rnn.weight_hh_l0 holds a value that is not finite",
        ),
        (changed(fc__weight=torch.ones(13, 6, dtype=torch.int8)), r"fc.weight is int8"),
        (changed(embedding__weight=None, fc__weight=None), r"no embedding of shape \[V, 6\] and no head of shape \[V"),
        (
            {name: tensor for name, tensor in Plain(width=5).state_dict().items() if not name.startswith("fc")},
            r"no head: expected a matrix of shape \[13, 6\] for the embedding embedding.weight \[13, 5\]",
        ),
        (
            {name: tensor for name, tensor in Plain(width=5).state_dict().items() if not name.startswith("emb")},
            r"no embedding: expected a matrix of shape \[13, 5\] for the head fc.weight \[13, 6\]",
        ),
    ],
)
def test_an_inexpressible_model_is_refused_with_its_tensor(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(ForeignError, match=message):
        imported(saved(tmp_path / "model.pt", tensors))


def test_a_nonlinearity_is_accepted_only_for_an_rnn(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"--nonlinearity is for an RNN, but the rows .* are those of a LSTM"):
        imported(saved(tmp_path / "model.pt", Plain().state_dict()), nonlinearity="relu")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("head", "expected NAME=THEIRS"),
        ("head=", "expected NAME=THEIRS"),
        ("decoder=x", "expected NAME=THEIRS"),
        ("layers.0.weight=x", "a layer has no weight, only weight_ih"),
    ],
)
def test_a_mapping_of_an_unknown_name_is_refused(option: str, message: str) -> None:
    with pytest.raises(ForeignError, match=message):
        parse_mapping([option])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("head=none.weight", "there is no tensor none.weight; known: embedding.weight, fc.bias"),
        ("layers.0=lstm", "no recurrent module has that name; known: rnn"),
        ("layers.1=rnn", r"--map names the layers \[1\]; count them from 0"),
    ],
)
def test_a_mapping_to_a_missing_name_lists_the_known_ones(tmp_path: Path, option: str, message: str) -> None:
    with pytest.raises(ForeignError, match=message):
        imported(saved(tmp_path / "model.pt", Plain().state_dict()), mapping=parse_mapping([option]))


class Trap:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("trapped"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Plain(), r"holds tests.training.audit.foreign_models.Plain, which only running code .*model.state_dict\(\)"),
        (
            {"state_dict": {}, "hyper": argparse.Namespace(lr=1)},
            r"holds argparse.Namespace, which only running code can read",
        ),
        ({"state_dict": {}, "trap": Trap()}, r"which only running code can read"),
        (torch.ones(3), r"holds a Tensor, expected named tensors"),
        ({}, r"holds no tensors"),
        ({"epoch": 3}, r"holds no tensors"),
    ],
    ids=["module", "namespace", "trap", "tensor", "empty", "no tensors"],
)
def test_a_file_with_anything_but_tensors_is_refused_without_running_its_code(
    tmp_path: Path, content: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForeignError, match=message):
        read_checkpoint(saved(tmp_path / "model.pt", content))
    assert not Path("trapped").exists()


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning):
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "script.pt"))
    with pytest.raises(ForeignError, match="a TorchScript archive, which is a program"):
        read_checkpoint(tmp_path / "script.pt")


@pytest.mark.parametrize(
    "data", [b"", b"hello, this is no checkpoint", b"PK\x03\x04abc", b"\x10\0\0\0\0\0\0\0{ not a header", b"\x80\x02."]
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with pytest.raises(ForeignError, match=r"model.pt: (neither a torch checkpoint|not a safetensors file)"):
        read_checkpoint(path)


def test_the_error_names_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"none.pt: No such file or directory"):
        read_checkpoint(tmp_path / "none.pt")


def test_numbers_and_arrays_of_numpy_beside_tensors_are_allowed(tmp_path: Path) -> None:
    module = Plain()
    beside = {
        "loss": np.float32(1.5),
        "epoch": np.int64(3),
        "best": np.bool_(True),
        "history": np.arange(4.0),
        "ids": np.array([[1, 2]], np.int32),
        "config": {"lr": np.float64(1e-3), "padding_idx": 0},
    }
    path = saved(tmp_path / "model.pt", {"model": module.state_dict(), **beside})
    assert_same(path, module)
    assert read_checkpoint(path).padding == {0}
    path = saved(tmp_path / "model.pt", {"model": module.state_dict(), "names": np.array(["a", Trap()], object)})
    with pytest.raises(ForeignError):
        read_checkpoint(path)
    assert not Path("trapped").exists()


def test_the_layouts_of_the_gru4rec_authors_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hidden, width = 6, 5
    for embedding in (None, nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, hidden)):
        module = _AuthorsGru4Rec(embedding, hidden)
        notes = assert_same(saved(tmp_path / "model.pt", module.state_dict()), module)
        assert "By.weight is assumed to be the head's bias, by its shape" in notes
    path = saved(tmp_path / "mapped.pt", {name.replace("By", "z"): one for name, one in module.state_dict().items()})
    assert_same(path, module, mapping=parse_mapping(["head.bias=z.weight"]))
    one_hot = {"GE.Wx0.weight": torch.ones(VOCABULARY, 18), "GE.Wh0": torch.ones(6, 18), "GE.Bh0": torch.zeros(18)}
    path = saved(tmp_path / "one_hot.pt", one_hot | {"Wy.weight": torch.ones(VOCABULARY, 6)})
    with pytest.raises(ForeignError, match=r"GE.Wh0 \[6, 18\].*the one-hot input of the GRU4Rec authors' program"):
        imported(path)


class _AuthorsGru4Rec(nn.Module):
    """GRU4Rec with the modules of its authors' PyTorch program: an embedding of its own, or the output layer's."""

    def __init__(self, embedding: nn.Embedding | None, hidden: int) -> None:
        super().__init__()
        self.E = embedding
        self.G = nn.ModuleList([nn.GRUCell(hidden if embedding is None else embedding.embedding_dim, hidden)])
        self.Wy = nn.Embedding(VOCABULARY, hidden)
        self.By = nn.Embedding(VOCABULARY, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (T, B) -> logits (T, B, V)."""
        state, outputs = None, []
        for x in (self.Wy if self.E is None else self.E)(tokens):
            state = self.G[0](x, state)
            outputs.append(state @ self.Wy.weight.T + self.By.weight.T)
        return torch.stack(outputs)


def test_the_assumptions_are_listed(tmp_path: Path) -> None:
    module = Plain()
    model = imported(saved(tmp_path / "plain.pt", module.state_dict()))
    assert model.assumptions == (
        "the embedding's rows are assumed to reach the bottom layer as they are",
        "no activation is assumed between the top layer and the head",
        "the head's output is assumed to be the logits, without another function on it",
    )
    two = module.state_dict() | {
        name.replace("rnn", "rnn2"): one for name, one in module.get_submodule("rnn").named_parameters("rnn")
    }
    model = imported(saved(tmp_path / "two.pt", {name.replace("rnn.", "rnn1."): one for name, one in two.items()}))
    assert model.assumptions[0] == "rnn2 is assumed to read the output of rnn1, not to run beside it"


@pytest.mark.parametrize("last_only", [True, False])
def test_a_check_compares_with_the_models_own_logits(tmp_path: Path, last_only: bool) -> None:
    module, path = Plain("gru", num_layers=2), tmp_path / "check.safetensors"
    model = imported(saved(tmp_path / "model.pt", module.state_dict()))
    tokens = some_tokens()[:, :1].contiguous()

    def write(logits: Tensor) -> None:
        save_file({"tokens": tokens, "logits": logits[-1:].contiguous() if last_only else logits.contiguous()}, path)

    with torch.no_grad():
        rnn, embedding, fc = (
            module.get_submodule(name) for name in (module.names[1], module.names[0], module.names[2])
        )
        states = rnn(embedding(tokens))[0]
        write(fc(states))
        assert "checked with check.safetensors: log-probabilities differ by at most" in check_logits(path, model)
        write(fc(states).log_softmax(-1))
        check_logits(path, model)
        others = (fc(states.relu()), fc(states) / 0.7, torch.tanh(fc(states)))
        for other in others:
            write(other)
            with pytest.raises(ForeignError, match=r"another than the one that wrote these logits.*no activation"):
                check_logits(path, model)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": torch.ones(3, dtype=torch.long)}, "expected the tensors tokens and logits, found tokens"),
        ({"tokens": torch.ones(3), "logits": torch.ones(3, VOCABULARY)}, "expected the ids of one sequence"),
        ({"tokens": torch.ones(3, 2, dtype=torch.long), "logits": torch.ones(6, VOCABULARY)}, "one sequence"),
        ({"tokens": torch.full((3,), VOCABULARY), "logits": torch.ones(3, VOCABULARY)}, "outside of the vocabulary"),
        ({"tokens": torch.ones(3, dtype=torch.long), "logits": torch.ones(2, VOCABULARY)}, r"logits has shape \[2, 13"),
        ({"tokens": torch.ones(3, dtype=torch.long), "logits": torch.full((3, VOCABULARY), torch.nan)}, "not finite"),
    ],
    ids=["missing", "floats", "batch", "range", "shape", "not finite"],
)
def test_a_wrong_check_file_is_refused(tmp_path: Path, tensors: Tensors, message: str) -> None:
    model = imported(saved(tmp_path / "model.pt", Plain().state_dict()))
    save_file(tensors, tmp_path / "check.safetensors")
    with pytest.raises(ForeignError, match=message):
        check_logits(tmp_path / "check.safetensors", model)
    with pytest.raises(ForeignError, match=r"none.safetensors: "):
        check_logits(tmp_path / "none.safetensors", model)
    (tmp_path / "text").write_text("tokens")
    with pytest.raises(ForeignError, match=r"text: not a safetensors file"):
        check_logits(tmp_path / "text", model)
