"""Generates docs/settings.md and docs/experiments.md from the classes of the settings and the experiments.

    python -m docs.reference

Tests check that the pages are up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from wane.models.architecture import Front
from wane.models.event_files.format import EventColumns, EventFormat
from wane.models.layer_registry import Attention, Convolution, Finite, InputGated, LayerSpec
from wane.service.settings import NOT_AN_OPTION, PREFIX, UNITS, Settings
from wane.training.config import (
    DataConfig,
    Experiment,
    ExportConfig,
    ModelConfig,
    ProofConfig,
    TeacherConfig,
    TrainingConfig,
)

HERE = Path(__file__).parent

GROUPS: dict[str, list[str]] = {
    title: names.split()
    for title, names in {
        "The five most important settings": "bundles default_model store session_budget_bytes api_keys_file",
        "Network": "host port workers trusted_proxies max_connections max_header_bytes max_body_bytes "
        "receive_budget_bytes header_timeout_s body_timeout_s send_timeout_s stream_idle_s",
        "Keys and pages": "api_keys console cors_origins",
        "Models": "require_all model_poll_interval_s load_timeout_s device threads",
        "Batches and queues": "max_batch_size max_queue inline_batch_max_us",
        "Limits of a request": "request_timeout_ms max_batch_inputs max_input_tokens max_scored_tokens "
        "max_generated_tokens max_filter_events max_window top_k_limit max_answer_bytes",
        "Sessions and their states": "session_history_tokens session_ttl_s session_file state_budget_bytes state_ttl_s "
        "prefix_states",
        "The shared store": "store_password_file store_namespace store_timeout_ms store_policy "
        "state_checkpoint_interval_tokens",
        "Shutdown": "shutdown_delay_ms drain_timeout_ms",
        "Observation": "shadow_rate live_accuracy log_level check_invariants",
    }.items()
}
"""Groups of settings. Each setting is in one group."""

TABLES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Top level", "", Experiment),
    ("[model]", "The network.", ModelConfig),
    ("[model.front]", "Causal convolutions before the first layer. Their memory is finite.", Front),
    (
        "[[model.layers]]",
        "One table for each layer, bottom to top. "
        "[training/experiments/families](../training/experiments/families) has examples.",
        LayerSpec,
    ),
    (
        '[[model.layers]], `kind` = "gated" or "leaky"',
        "Gates that do not depend on the state. Those of `leaky` are constant.",
        InputGated,
    ),
    (
        '[[model.layers]], `kind` = "convolution" or "attention"',
        "A layer with finite memory. Such layers stand below the recurrent layers, or alone.",
        Finite,
    ),
    ('[[model.layers]], `kind` = "convolution"', "A causal convolution and its activation.", Convolution),
    ('[[model.layers]], `kind` = "attention"', "Causal attention over the last tokens.", Attention),
    ("[data]", "The corpus. [Training on events](event_training.md) explains the fields of events.", DataConfig),
    (
        "[data], for files of events",
        "How the files are read. [Training on events](event_training.md) has these fields for published data sets.",
        EventFormat,
    ),
    ("[data.columns]", "The columns of a table of events, by name or by number from 1.", EventColumns),
    (
        "[training]",
        "The optimisation of the weights. After `warmup` steps, the schedule `constant` keeps the learning rate, "
        "`cosine` lowers it to 0, and `inverse_time` sets it to `learning_rate` / t in the t-th step after the "
        "warm-up. `plateau` keeps the learning rate until the validation loss stops improving, or until only "
        "`decay_steps` steps are left, and then lowers it linearly to 0.",
        TrainingConfig,
    ),
    (
        "[training.proof]",
        "A loss term for predictions whose most probable token is not proved by a window. The lead is the difference "
        "between the logits of this token and of a competing token. The ratio is the largest change of the lead that "
        "the tokens before the window can cause, divided by the lead.",
        ProofConfig,
    ),
    (
        "[training.teacher]",
        "A trained network, the teacher, whose predictions are targets too: the loss has a share `weight` of the "
        "divergence between the predictions of the two networks.",
        TeacherConfig,
    ),
    ("[export]", "Texts and values for the bundle's manifest.", ExportConfig),
)


def settings_page() -> str:
    """Returns docs/settings.md, which has every setting in its group."""
    lines = [
        "# Settings",
        "",
        "Each setting is a variable `WANE_...` and an option of `wane serve`: `WANE_MAX_QUEUE=64` or `--max-queue 64`.",
        "An option overrides the variable. An unknown `WANE_...` variable is an error, and the server exits.",
        "This page is generated from `service/settings.py`.",
    ]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}", "", "| setting | default | unit | meaning |", "| --- | --- | --- | --- |"]
        for name in names:
            field = Settings.model_fields[name]
            unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
            variable = f"`{PREFIX}{name.upper()}`" + (" (no option)" if name in NOT_AN_OPTION else "")
            default = "not set" if field.default is None else f"`{_default(name, field.default)}`"
            lines.append(f"| {variable} | {default} | {unit} | {_cell(field.description or '')} |")
    return "\n".join([*lines, ""])


def _default(name: str, value: object) -> object:
    """Returns a default for the page. The path of the shipped bundles depends on the installation, so the page has a
    description instead of it."""
    return "the shipped models" if name == "bundles" else value


def experiments_page() -> str:
    """Returns docs/experiments.md, which has every field of an experiment file."""
    lines = [
        "# Experiment files",
        "",
        "`wane train FILE` trains the model that a TOML file describes. This page lists the fields of each table. An",
        "unknown field is an error. The files of the shipped models are in",
        "[training/experiments](../training/experiments). A small experiment:",
        "",
        "```toml",
        'name = "mine"',
        "",
        "[model]",
        'cell = "gated"',
        "hidden = 64",
        "contraction = 0.9",
        "",
        "[data]",
        'kind = "events"',
        'path = "sessions.jsonl"',
        "",
        "[training]",
        "steps = 1000",
        "```",
        "",
        "This page is generated from `training/config.py`.",
    ]
    for title, about, model in TABLES:
        lines += ["", f"## {title}", ""]
        if about:
            lines += [about, ""]
        lines += ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        for name, field in model.model_fields.items():
            if name not in model.__annotations__ or (name == "kind" and model is not LayerSpec):
                continue  # the field is inherited, and its class has its own section
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                continue  # the field is a table, which has its own section
            default = "required" if field.is_required() else "absent" if field.default is None else f"`{_toml(field)}`"
            if field.default is PydanticUndefined and not field.is_required():
                default = "absent"
            lines.append(f"| `{name}` | {_cell(_type(field))} | {default} | {_cell(field.description or '')} |")
    return "\n".join([*lines, ""])


def _toml(field: FieldInfo) -> str:
    return json.dumps(field.default)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    """Returns a description of a TOML value's type and range."""
    kinds = " or ".join(dict.fromkeys(_kinds(field.annotation)))
    limits = ", ".join(_limits([*field.metadata, *_metadata(field.annotation)]))
    return f"{kinds} {limits}".strip()


def _kinds(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield ", ".join(f'`"{value}"`' for value in arguments)
    elif hasattr(annotation, "__metadata__"):
        yield from _kinds(arguments[0])
    elif origin is tuple:
        yield f"list of {next(_kinds(arguments[0]))}s"
    elif arguments:
        for argument in arguments:
            if argument is not type(None):
                yield from _kinds(argument)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "table"
    else:
        yield {int: "integer", float: "number", bool: "boolean", str: "string", Path: "path"}[annotation]


def _metadata(annotation: Any) -> list[Any]:
    """Returns the limits in a type's annotation. For a union, returns the limits of the first
    member that has limits."""
    found = getattr(annotation, "__metadata__", None)
    if found is not None:
        return [limit for one in found for limit in (one.metadata if isinstance(one, FieldInfo) else [one])]
    return next((limits for argument in get_args(annotation) if (limits := _metadata(argument))), [])


def _limits(metadata: list[Any]) -> Iterator[str]:
    for one in metadata:
        parts = [one] if not isinstance(one, Interval) else list(one)
        for part in parts:
            match part:
                case Ge(ge=value):
                    yield f">= {value:g}"
                case Gt(gt=value):
                    yield f"> {value:g}"
                case Le(le=value):
                    yield f"<= {value:g}"
                case Lt(lt=value):
                    yield f"< {value:g}"
                case _:
                    pass


PAGES = {"settings.md": settings_page, "experiments.md": experiments_page}


def main() -> None:
    """Writes both pages to the docs folder."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
