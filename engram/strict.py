"""Strict YAML and dictionaries into frozen dataclasses: an unknown key, a wrong type or a bad choice is an error.

No torch in here. Errors name the field, the value and what would be right.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message names the field, the value and the remedy."""


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from a mapping. Raises ConfigError on unknown keys, wrong types and bad choices."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__}: expected a mapping of fields, got {data!r}")
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
    for key in data:
        if key not in fields:
            raise ConfigError(f"{_join(where, key)}: unknown key; {cls.__name__} knows {', '.join(sorted(fields))}")
    hints = typing.get_type_hints(cls)
    values = {key: _coerce(hints[key], value, _join(where, str(key))) for key, value in data.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where or cls.__name__}: missing required field(s) {', '.join(missing)}")
    return cls(**values)


def check_fields(config: Any, where: str = "") -> None:
    """Check (and convert: lists to tuples, ints to floats) the fields of a frozen dataclass built directly.

    Called from `__post_init__`, so that Python construction is as strict as YAML. Raises ConfigError naming the field.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, _coerce(hint, getattr(config, name), _join(where, name)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data of a dataclass: dictionaries, lists, numbers and strings, ready for JSON or YAML."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read one YAML mapping. A `base: other.yaml` key (relative to the file) is loaded first and merged over."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not valid YAML: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"config {path}: expected a mapping at the top level, got {type(data).__name__}")
    base = data.pop("base", None)
    return merge(load_yaml(path.parent / base), data) if base is not None else data


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, mappings merged key by key, everything else replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `a.b=value` strings (values are YAML) to a nested mapping. Raises ConfigError on a malformed string."""
    out = dict(data)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item!r}: expected key=value, for example memory.heads=4")
        try:
            value: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {item!r}: the value is not valid YAML: {error}") from error
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        out = merge(out, value)
    return out


def choice(field: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{field}: {value!r} is not known; choose one of {', '.join(map(repr, allowed))}")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """Check `value` against a type hint; YAML lists become tuples, ints become floats where a float is wanted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        errors = []
        for option in args:
            if option is type(None):
                if value is None:
                    return None
                continue
            try:
                return _coerce(option, value, where)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[-1] if len(errors) == 1 else f"{where}: {value!r} fits none of {_name(hint)}")
    if origin is typing.Literal:
        choice(where, value, args)
        return value
    if origin is tuple:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_coerce(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(args) != len(value):
            raise ConfigError(f"{where}: expected a list of {len(args)}, got {value!r}")
        return tuple(_coerce(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping, got {value!r}")
        return {_coerce(args[0], k, where): _coerce(args[1], v, _join(where, str(k))) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, typing.cast(type, hint)) else from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML reads 1e-3 (no dot) as a string
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{where}: expected float, got {value!r}") from None
    if hint in (int, float, str, bool):
        if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
            return value
        if hint is int and hasattr(value, "__index__") and not isinstance(value, bool):  # NumPy integers
            return int(value)
        raise ConfigError(f"{where}: expected {_name(hint)}, got {value!r}")
    raise ConfigError(f"{where}: fields of type {_name(hint)} are not supported in configs")


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))
