from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.bundles import edit_manifest, remove_field, rewrite, small_architecture, write_small_bundle
from wane.models.bundle import Bundle, BundleError, BundleExistsError, verify_graphs, write_bundle
from wane.models.bundle_checks import check_unknown
from wane.models.manifest import Perplexity, Quality, Role
from wane.models.parity import Tensors
from wane.models.weights import decode_weights, encode_weights

FILES = (
    *("step.onnx", "window.onnx", "advance.onnx", "scan.onnx", "head.onnx"),
    *("weights.safetensors", "tokenizer.json"),
)


QUALITY = {
    "tokens": {"test": 12},
    "words": {"test": 12},
    "recurrent": {"test": {"per_token": 3.0}},
    "window": {"test": {"positions": 2, "recurrent": {"per_token": 3.0}, "by_k": {"1": {"per_token": 4.0}}}},
    "window_within_half_percent": None,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_small_bundle(tmp_path / "small")
    return tmp_path / "small"


def refused(path: Path, *parts: str) -> None:
    """Asserts that `Bundle.read` refuses the bundle with a message that contains every text of `parts`."""
    with pytest.raises(BundleError) as caught:
        Bundle.read(path)
    for part in parts:
        assert part in str(caught.value)


def test_a_written_bundle_reads_back(path: Path) -> None:
    bundle = Bundle.read(path)
    assert bundle.path == path
    assert bundle.manifest.name == "small"
    assert set(bundle.manifest.files) == set(FILES)
    assert bundle.vocabulary.encode("a b i") == [2, 3, 10]
    assert bundle.graph_path("advance") == path / "advance.onnx"
    assert bundle.weights()["embedding.weight"].shape == (11, 6)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_detected(path: Path, name: str) -> None:
    data = bytearray((path / name).read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    refused(path, str(path / name), f"expected {expected}", f"found {hashlib.sha256(data).hexdigest()}")


@pytest.mark.parametrize("name", (*FILES, "manifest.json"))
def test_the_error_names_a_missing_file(path: Path, name: str) -> None:
    (path / name).unlink()
    refused(path, str(path / name), "the file is missing")


def test_a_newer_manifest_is_refused(path: Path) -> None:
    edit_manifest(path, "schema_version", value=7)
    edit_manifest(path, "a_field_of_the_future", value=True)
    refused(path, "written by a newer version of Wane: schema_version is 7, but this version reads up to 6")


def test_a_manifest_of_schema_3_is_read(path: Path) -> None:
    edit_manifest(path, "schema_version", value=3)
    for field in ("unknown", "start"):
        remove_field(path, field)
    manifest = Bundle.read(path).manifest
    assert (manifest.schema_version, manifest.unknown, manifest.start) == (3, "refuse", "token")


def test_a_model_may_start_from_the_zero_state(path: Path) -> None:
    assert Bundle.read(path).manifest.start_tokens == (1,)
    edit_manifest(path, "start", value="zero")
    assert Bundle.read(path).manifest.start_tokens == ()


def test_what_becomes_of_unknown_events_must_fit_the_vocabulary(path: Path) -> None:
    edit_manifest(path, "unknown", value="skip")
    refused(path, "unknown: 'skip' needs a vocabulary of kind 'events', not 'words'")
    edit_manifest(path, "vocabulary", "kind", value="events")
    assert Bundle.read(path).manifest.unknown == "skip"
    edit_manifest(path, "unknown", value="token")
    bundle = Bundle.read(path)
    bundle.vocabulary.unk_id = None
    with pytest.raises(BundleError, match="unknown: 'token' needs the token <unk>, which the vocabulary lacks"):
        check_unknown(path, bundle.manifest, bundle.vocabulary)


def test_an_older_manifest_is_refused_with_the_advice_to_export_again(path: Path) -> None:
    edit_manifest(path, "schema_version", value=2)
    edit_manifest(path, "certificate", value={"all_layers": True})
    refused(path, "schema_version is 2, but this version reads 3 to 6: export the bundle again")


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("window",), 0, "window: Input should be greater than or equal to 1"),
        (("schema_version",), True, "schema_version: Input should be a valid integer"),
        (("schema_version",), 0, "schema_version: Input should be greater than or equal to 3"),
        (("max_window",), 65_537, "max_window: Input should be less than or equal to 65536"),
        (("certificate", "layers", 0, "factor"), float("inf"), "certificate.layers.0.factor: Input should be a finite"),
        (("provenance", "train_wall_s"), float("nan"), "provenance.train_wall_s: Input should be a finite number"),
        (("provenance", "steps"), -1, "provenance.steps: Input should be greater than or equal to 0"),
        (("quality", "tokens", "test"), -1, "quality.tokens.test: Input should be greater than or equal to 0"),
        (("quality", "words", "test"), -1, "quality.words.test: Input should be greater than or equal to 0"),
        (("quality", "recurrent", "test", "per_token"), float("inf"), "per_token: Input should be a finite number"),
        (("quality", "window", "test", "by_k", "0"), {"per_token": 2}, "Input should be greater than or equal to 1"),
        (("quality", "window_within_half_percent"), 0, "Input should be greater than or equal to 1"),
        (("window",), 9, "window 9 is larger than max_window 8"),
        (("surprise",), 1, "surprise: Extra inputs are not permitted"),
        (("architecture", "layers", 0, "kind"), "tape", "architecture.layers.0: Input tag 'tape' found using 'kind'"),
        (("vocabulary", "sha256"), "0" * 64, "vocabulary.sha256: the manifest says 000000"),
        (("vocabulary", "eos_id"), 5, "vocabulary.eos_id: the manifest says 5, the file has 1"),
        (("opset",), 99, "opset: 99 is newer than 21"),
        (("weights",), "other.safetensors", "weights: 'other.safetensors' has no hash in `files`"),
        (("graphs", "head"), "neck.onnx", "graphs.head: 'neck.onnx' has no hash in `files`"),
        (("certificate", "layers"), [], "certificate.layers: 0 entries claimed, the weights give 2"),
    ],
)
def test_the_error_names_an_invalid_field(path: Path, keys: tuple[str | int, ...], value: object, message: str) -> None:
    edit_manifest(path, "quality", value=QUALITY)
    Bundle.read(path)
    edit_manifest(path, *keys, value=value)
    refused(path, "manifest.json" if "vocabulary" not in keys else "tokenizer.json", message)


def test_the_error_names_a_missing_role(path: Path) -> None:
    graphs = json.loads((path / "manifest.json").read_text())["graphs"]
    del graphs["scan"]
    edit_manifest(path, "graphs", value=graphs)
    refused(path, "graphs: the role 'scan' is missing")


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "sub/file.bin", "..", "a\\b", ""])
def test_a_file_outside_the_bundle_is_never_opened(path: Path, name: str) -> None:
    edit_manifest(path, "files", name, value="0" * 64)
    refused(path, "files", repr(name), "is not the plain name of a file in the bundle")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "step.onnx"])
@pytest.mark.parametrize(("make", "kind"), [(fifo, "a FIFO"), (device, "a device"), (Path.mkdir, "a folder")])
def test_a_file_that_is_not_a_regular_file_is_refused(
    path: Path, name: str, make: Callable[[Path], object], kind: str
) -> None:
    (path / name).unlink()
    make(path / name)
    refused(path, f"{name}: must be a regular file, or a link to one, but is {kind}")


def test_links_to_regular_files_are_followed(path: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for file in path.iterdir():
        (links / file.name).symlink_to(file)
    assert Bundle.read(links).manifest == Bundle.read(path).manifest


def test_a_manifest_that_is_too_long_is_refused(path: Path) -> None:
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(2**40)  # a sparse file, which takes no space on the disk
    refused(path, "manifest.json: has more than 16777216 bytes")


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2", "\udcff", "[" * 200_000, "1" * 10_000],
    ids=["empty", "cut off", "not UTF-8", "deep", "a long integer"],
)
def test_a_manifest_that_is_not_json_is_refused(path: Path, text: str) -> None:
    (path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(path, "manifest.json", "cannot be read as JSON")


@pytest.mark.parametrize("value", ["[]", "null", "3"])
def test_a_manifest_that_is_not_an_object_is_refused(path: Path, value: str) -> None:
    (path / "manifest.json").write_text(value)
    refused(path, "manifest.json")


@pytest.mark.parametrize(("field", "value"), [("rule", "faith"), ("norm", "|s|_3"), ("layer", 0)])
def test_a_certificate_with_another_rule_is_refused(path: Path, field: str, value: object) -> None:
    edit_manifest(path, "certificate", "layers", 1, field, value=value)
    refused(path, f"certificate.layers.1.{field}", f"{value!r} claimed, the weights give")


@pytest.mark.parametrize("change", [lambda p, q: [p, q * (1 + 1e-4)], lambda p, q: [q, p], lambda p, q: []])
def test_a_certificate_with_other_norm_weights_is_refused(
    path: Path, change: Callable[[float, float], list[float]]
) -> None:
    write_small_bundle(path, small_architecture("lstm", hidden=48, embedding=48), replace=True)
    p, q = Bundle.read(path).manifest.certificate.layers[0].weights
    edit_manifest(path, "certificate", "layers", 0, "weights", value=change(p, q))
    refused(path, "certificate.layers.0.weights")


def test_a_model_that_falsely_claims_to_be_contractive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "unstable"
    manifest = write_small_bundle(path)
    weights = decode_weights((path / manifest.weights).read_bytes())
    weights["layers.0.cell.weight_hh_l0"] *= 100
    rewrite(path, manifest.weights, encode_weights(weights))
    refused(path, "certificate.layers.0.factor")


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (("state_error", 3), lambda value: value * (1 - 1e-5)),
        (("error_bound", 7), lambda value: value * (1 - 1e-5)),
        (("head_diameter",), lambda value: value * 0.9),
        (("certified",), lambda value: not value),
        (("reason",), lambda value: "it is fine" if value is None else None),
        (("layers", 1, "factor"), lambda value: value * (1 - 1e-6)),
        (("layers", 1, "reach"), lambda value: value / 2),
        (("layers", 1, "input_gain"), lambda value: value / 2),
        (("layers", 0, "conditions", 0, "factor"), lambda value: value / 2),
        (("layers", 0, "conditions", 0, "rule"), lambda value: "faith"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_every_number_of_a_certificate_is_recomputed(
    tmp_path: Path, keys: tuple[str | int, ...], change: Callable[[Any], object]
) -> None:
    path = tmp_path / "small"
    write_small_bundle(path, small_architecture("rnn_tanh"))
    claimed: Any = json.loads((path / "manifest.json").read_text())["certificate"]
    assert claimed["contractive"]
    for key in keys:
        claimed = claimed[key]
    edit_manifest(path, "certificate", *keys, value=change(claimed))
    refused(path, f"certificate.{'.'.join(map(str, keys))}: {change(claimed)!r} claimed, the weights give {claimed!r}")


def test_a_truncated_curve_is_refused(path: Path) -> None:
    write_small_bundle(path, small_architecture("rnn_tanh"), replace=True)
    edit_manifest(path, "certificate", "state_error", value=[])
    refused(path, "certificate.state_error: 0 entries claimed, the weights give 8")


def test_the_contractive_flag_is_recomputed(path: Path) -> None:
    claimed = Bundle.read(path).manifest.certificate.contractive
    edit_manifest(path, "certificate", "contractive", value=not claimed)
    refused(path, f"certificate.contractive: {not claimed} claimed, the weights give {claimed}")


def test_weights_of_another_shape_are_refused_despite_a_valid_hash(path: Path) -> None:
    weights = Bundle.read(path).weights()
    weights["head.bias"] = np.zeros(3, np.float32)
    rewrite(path, "weights.safetensors", encode_weights(weights))
    refused(path, "weights.safetensors", "tensor head.bias has shape [3], expected [11]")


def test_an_invalid_tokenizer_is_refused_despite_a_valid_hash(path: Path) -> None:
    rewrite(path, "tokenizer.json", b'{"version": "1.0"}')
    refused(path, "tokenizer.json is not a tokenizers file")


def contents(path: Path) -> dict[str, bytes]:
    """Returns the contents of every file of a folder."""
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def evaluated(split: str, perplexity: float) -> Quality:
    """Returns a manifest's quality fields with only the recurrent perplexity of one split."""
    recurrent = {split: Perplexity(per_token=perplexity)}
    return Quality(tokens={}, words={}, recurrent=recurrent, window={}, window_within_half_percent=None)


@pytest.mark.parametrize("name", ["new", "small"])
def test_a_bundle_that_fails_its_check_is_not_left_behind_and_the_old_one_is(path: Path, name: str) -> None:
    before, bundle = contents(path), Bundle.read(path)
    files = {name: before[name] for name in FILES}

    def check(written: Bundle) -> None:
        assert written.manifest == bundle.manifest
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write_bundle(path.with_name(name), bundle.manifest, files, check, replace=name == "small")
    assert contents(path) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["small"]


@pytest.mark.parametrize("version", ["1", "0"], ids=["the same version", "a lower version"])
def test_a_bundle_is_not_replaced_silently(path: Path, version: str) -> None:
    write_small_bundle(path, quality=evaluated("valid", 3.25), replace=True)
    before = contents(path)
    message = f"version 1, validation perplexity 3.250; the new bundle: version {version}, perplexity 9.000 (audit)"
    with pytest.raises(BundleExistsError, match=re.escape(message)):
        write_small_bundle(path, small_architecture("gru"), version=version, quality=evaluated("audit", 9.0))
    with pytest.raises(BundleExistsError, match=f"the new bundle: version {version}, not evaluated"):
        write_small_bundle(path, small_architecture("gru"), version=version)
    assert contents(path) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["small"]


def test_a_higher_version_replaces_a_lower_one(path: Path) -> None:
    write_small_bundle(path, version="9", replace=True)
    write_small_bundle(path, version="10")
    assert Bundle.read(path).manifest.version == "10"


def test_a_bundle_that_cannot_be_read_is_replaced_only_on_request(path: Path) -> None:
    (path / "manifest.json").write_text("{")
    with pytest.raises(BundleExistsError, match=r"manifest\.json: cannot be read as JSON"):
        write_small_bundle(path, version="2")
    assert (path / "manifest.json").read_text() == "{"
    write_small_bundle(path, version="2", replace=True)
    assert Bundle.read(path).manifest.version == "2"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_path_that_is_not_a_bundle_is_never_replaced(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "small"
    kept = place / "kept" if kind == "folder" else place
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("a user's own")
    with pytest.raises(BundleExistsError, match="is not a bundle"):
        write_small_bundle(place, replace=True)
    assert kept.read_text() == "a user's own"


def test_an_interrupt_between_the_two_moves_restores_the_old_bundle(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = contents(path), Path.rename

    def interrupted(source: Path, target: Path) -> Path:
        moved = rename(source, target)
        if target.name == "replaced":
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_small_bundle(path, small_architecture("gru"), replace=True)
    assert contents(path) == before


def test_replacing_a_bundle_leaves_no_file_of_the_previous_bundle(path: Path) -> None:
    (path / "left over.txt").write_text("of the previous bundle")
    write_small_bundle(path, small_architecture("gru"), replace=True)
    assert Bundle.read(path).manifest.architecture.family == "gru"
    assert {entry.name for entry in path.iterdir()} == {*FILES, "manifest.json"}
    assert [entry.name for entry in path.parent.iterdir()] == ["small"]


def test_a_bundle_that_cannot_be_moved_into_place_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(path)
    rename, moves = Path.rename, []

    def fails_at_the_second(source: Path, target: Path) -> Path:
        moves.append(target)
        if len(moves) == 2:
            raise PermissionError("no")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fails_at_the_second)
    with pytest.raises(PermissionError, match="no"):
        write_small_bundle(path, small_architecture("gru"), replace=True)
    assert moves[1] == path
    assert contents(path) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["small"]


def test_a_bundle_behind_a_link_is_replaced_at_the_target(path: Path) -> None:
    link = path.parent / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(path)
    write_small_bundle(link, small_architecture("gru"), replace=True)
    assert link.is_symlink()
    assert Bundle.read(path).manifest.architecture.family == "gru"
    assert [entry.name for entry in link.parent.iterdir()] == ["link"]


def test_graphs_that_differ_from_the_oracle_are_refused(path: Path) -> None:
    bundle = Bundle.read(path)
    with pytest.raises(BundleError, match=re.escape(f"{path}: window, a batch: the graph has no output logits")):
        verify_graphs(bundle, lambda role, feeds: {})


def test_graphs_that_do_not_run_are_refused(path: Path) -> None:
    def run(role: Role, feeds: Tensors) -> Tensors:
        raise ValueError("Required inputs (['layers.0.h']) are missing from input feed (['tokens']).")

    message = f"{path}: window, a batch: the graph cannot run: Required inputs (['layers.0.h']) are missing"
    with pytest.raises(BundleError, match=re.escape(message)):
        verify_graphs(Bundle.read(path), run)
