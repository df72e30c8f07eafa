from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.figures import manifests, of_events
from wane.models.manifest import Manifest
from wane.training.config import Experiment
from wane.training.errors import ConfigError

SHIPPED = sorted((Path(__file__).parents[2] / "training" / "experiments").glob("*.toml"))
VALID = """
name = "one"
[model]
cell = "lstm"
hidden = 8
[data]
kind = "text"
[training]
steps = 3
"""
KIND, EVENTS = 'kind = "text"', 'kind = "events"'


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_experiment_is_valid_and_named_like_its_file(path: Path) -> None:
    assert Experiment.read(path).name == path.stem


@pytest.mark.parametrize("manifest", [*manifests(), of_events()], ids=lambda manifest: manifest.name)
def test_a_shipped_bundle_was_trained_by_the_experiment_of_its_name(manifest: Manifest) -> None:
    experiment = Experiment.read(SHIPPED[0].parent / f"{manifest.name}.toml")
    # Keys that did not exist when the bundle was exported get their defaults.
    trained = Experiment.model_validate(manifest.provenance.config)
    assert trained.model_copy(update={"data": experiment.data}) == experiment
    assert trained.data == experiment.data.model_copy(update={"path": None})


def test_a_truncated_twin_differs_from_its_recurrent_model_only_in_the_regime() -> None:
    folder = SHIPPED[0].parent
    recurrent = Experiment.read(folder / "gated-stable.toml")
    truncated = Experiment.read(folder / "gated-stable-truncated.toml")
    assert recurrent.model == truncated.model
    assert recurrent.data == truncated.data
    assert recurrent.training.model_copy(update={"regime": "truncated"}) == truncated.training
    assert truncated.training.chunk == truncated.export.window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps = 3", "steps = 3\nstepz = 4"), r"training\.stepz: there is no such key; did you mean steps\?"),
        (('name = "one"', 'name = "one"\nauthor = "x"'), r"author: there is no such key"),
        (("hidden = 8", "hidden = 0"), r"model\.hidden: .*greater than or equal to 1"),
        (('"lstm"', '"transformer"'), r"model\.cell: Input should be"),
        (('name = "one"', 'name = "../one"'), r"name: String should match pattern"),
        (("steps = 3", 'steps = 3\nschedule = "plateau"'), r"training: .*needs 0 < decay_steps <= steps"),
        (("steps = 3", "steps = 3\npatience = 2"), r"training: .*belong to schedule = 'plateau'"),
        (("steps = 3", "steps = "), r"not TOML"),
        (("hidden = 8", "hidden = 8\nembedding = 5"), r"file: .*tied weights need embedding == hidden, not 5 and 8"),
        (("hidden = 8", "hidden = 8\nfeed_forward = 4"), r"model: .*feed_forward needs block = 'residual'"),
        (("hidden = 8", "hidden = 8\nspectral_limit = 2.0"), r"model: .*spectral_limit needs block = 'residual'"),
        (("hidden = 8", "hidden = 8\nspectral_limit = 0"), r"model\.spectral_limit: .*greater than 0"),
        (("hidden = 8", "hidden = true"), r"model\.hidden: Input should be a valid integer"),
        (("hidden = 8", 'hidden = "8"'), r"model\.hidden: Input should be a valid integer"),
        (("steps = 3", "steps = 3\nlearning_rate = inf"), r"training\.learning_rate: .*finite"),
        (("[training]", "[export]\nwindow = 9\nmax_window = 8\n[training]"), r"export: .*larger than max_window 8"),
        ((KIND, f"{KIND}\nmin_count = 2"), r"data: .*min_count needs kind = 'events'"),
        ((KIND, f'{KIND}\nstart = "zero"'), r"data: .*start needs kind = 'events'"),
        ((KIND, f"{KIND}\nvocabulary_size = 100"), r"data: .*vocabulary_size 100 is below 258"),
        ((KIND, f"{EVENTS}\nvocabulary_size = 2"), r"data\.vocabulary_size: .*greater than or equal to 3"),
        ((KIND, f"{EVENTS}\nsession_gap_s = 0"), r"data\.session_gap_s: .*greater than 0"),
        ((KIND, f'{EVENTS}\ncolumns = {{user = "x"}}'), r"data\.columns\.user: there is no such key"),
        ((f"{KIND}\n", f"{EVENTS}\n[training.proof]\nweight = 0.1\n"), r"training\.proof needs text"),
        (
            (f"[data]\n{KIND}\n[training]", f"cache = 8\n[data]\n{KIND}\n[training]\nnegatives = 9"),
            r"training\.negatives needs a model without a cache",
        ),
    ],
    ids=lambda value: value[1].splitlines()[-1] if isinstance(value, tuple) else None,
)
def test_the_error_names_an_invalid_key(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "one.toml"
    path.write_text(VALID.replace(*change))
    with pytest.raises(ConfigError, match=message):
        Experiment.read(path)


def test_a_path_is_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "one.toml"
    path.write_text(VALID.replace('kind = "text"', 'kind = "text"\npath = "../data/text.txt"'))
    monkeypatch.chdir(tmp_path / "runs")
    expected = tmp_path / "data" / "text.txt"
    assert Experiment.read(path).data.path == Experiment.read(Path("one.toml")).data.path == expected
    assert Experiment.read(SHIPPED[0].parent / "licence.toml").data.path == Path(__file__).parents[2] / "LICENSE"


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        Experiment.read(tmp_path / "none.toml")


def test_the_error_names_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"one\.toml: not UTF-8 at byte 8"):
        Experiment.read(path)
