"""From what a user wrote to a `Config`, and back."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from trace_jax import methods
from trace_jax.config.errors import ConfigError, require
from trace_jax.config.sections import Config
from trace_jax.model import ModelConfig
from trace_jax.model.checkpoint_io import checkpoint_config


def default(**model) -> ml_collections.ConfigDict:
    """A ConfigDict with every key at its default and the given model shape.

    Without a shape `model` is empty, for the one of init.checkpoint.
    """
    fields = {f.name: f.default for f in dataclasses.fields(Config)} | {"model": {}}
    if model:
        fields["model"] = ModelConfig(**model)
    return ml_collections.ConfigDict({k: _plain(v) for k, v in fields.items()})


def freeze(tree: Mapping[str, Any], given: Collection[str] = ()) -> Config:
    """The validated `Config` of a ConfigDict or mapping.

    A ConfigDict is what a user wrote: its method's settings are filled in, except where it
    has something else than the default and at the dotted paths `given`. A plain mapping is
    a configuration read back, and is taken as it stands.

    The model of init.checkpoint, where there is one, is that of the checkpoint.

    Raises:
      ConfigError: unknown key (with the nearest name), missing key, wrong type,
        NaN or infinity, a model that is not the checkpoint's, or values that cannot work
        together.
    """
    if isinstance(tree, ml_collections.ConfigDict):
        tree = _with_method(tree.to_dict(), given)
    init = tree.get("init")
    name = init.get("checkpoint") if isinstance(init, Mapping) else None
    if isinstance(name, str) and name:
        tree = {**tree, "model": _model_of(name, tree.get("model", {}))}
    require(
        tree.get("model") != {},
        "model is empty; write its shape, or init.checkpoint with the folder of a checkpoint",
    )
    return _build(Config, tree, "")


def _with_method(tree: Mapping[str, Any], given: Collection[str]) -> Mapping[str, Any]:
    if tree.get("method") not in methods.METHODS:  # none, or one that is refused later
        return tree
    known = [f for f in dataclasses.fields(Config) if f.default is not dataclasses.MISSING]
    return methods.apply(tree, {f.name: _plain(f.default) for f in known}, given)


def _plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def _model_of(name: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's model as settings; `stated` ones must agree, but for the dtype."""
    found = checkpoint_config(name, stated.get("dtype", "bfloat16"))
    model = dataclasses.asdict(found)
    hints = typing.get_type_hints(ModelConfig)
    for key in [k for k in stated if k in model]:
        value = _coerce(hints[key], stated[key], f"model.{key}")
        require(
            value == getattr(found, key),
            f"model.{key} is {value!r} and that of init.checkpoint {getattr(found, key)!r}; "
            "leave model.* out, the checkpoint brings its own",
        )
    return dict(stated) | model


def to_dict(config: Config) -> dict:
    """Plain nested dict, as `freeze` takes it; tuples become lists in JSON and back."""
    return dataclasses.asdict(config)


def _build(cls, tree: Mapping[str, Any], prefix: str):
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in tree:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"unknown config key {prefix}{key}; {hint}")
    values = {}
    for name, field in fields.items():
        if name not in tree:
            required = field.default is dataclasses.MISSING
            require(not required, f"config key {prefix}{name} is missing; write a value for it")
            continue
        values[name] = _coerce(hints[name], tree[name], f"{prefix}{name}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: {error}") from error


def _coerce(hint, value, path):
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), f"{path} must be a group of settings, not {value!r}")
        return _build(hint, value, f"{path}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is tuple and isinstance(value, list | tuple):
        return _tuples(value)
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    wrong = not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    require(not wrong, f"{path} is {value!r}; write a value of type {name}")
    if isinstance(value, float):
        require(math.isfinite(value), f"{path} is {value}; write a finite number")
    return value


def _tuples(value):
    if isinstance(value, list | tuple):
        return tuple(_tuples(v) for v in value)
    if isinstance(value, Mapping):
        return tuple((k, _tuples(v)) for k, v in value.items())
    return value
