"""Fill a configuration dataclass: flag > `COPPICE_*` variable > TOML file > default. No torch here.

The field `page_size` of a service is `--page-size`, `COPPICE_PAGE_SIZE`, and `page_size` in the
table of that service in the file: one file serves them all.

    [target]
    model = "/models/llama"
    page_size = 16

    [orchestrator]
    targets = ["gpu0:50051", "gpu1:50051"]
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

from shared.config.check import check_config, flag_name, normalize_choice
from shared.errors import ConfigError

Config = TypeVar("Config")

ENV_PREFIX = "COPPICE_"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


def add_config_flags(parser: argparse.ArgumentParser, config_type: type) -> None:
    """Add one flag per field of `config_type`; a flag that is not given leaves no trace."""
    group = parser.add_argument_group(
        "configuration", "also as COPPICE_* variables and in --config"
    )
    for spec in fields(config_type):
        names = [flag_name(name) for name in (spec.name, *spec.metadata["aliases"])]
        help_text = f"{spec.metadata['help']} (default: {spec.default!r})".replace("%", "%%")
        if isinstance(spec.default, bool):
            group.add_argument(
                *names,
                dest=spec.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
        else:
            group.add_argument(
                *names,
                dest=spec.name,
                metavar=type(spec.default).__name__.upper(),
                default=argparse.SUPPRESS,
                help=help_text,
            )


def load_config(
    config_type: type[Config],
    *,
    section: str,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Mapping[str, Any]],
    known_variables: Iterable[str],
) -> Config:
    """Build and check a `config_type`; see `explicit_values` for the arguments.

    Raises: ConfigError naming the flag, variable or key, and what was expected.
    """
    values = explicit_values(
        config_type,
        section=section,
        flags=flags,
        environ=environ,
        file=file,
        known_variables=known_variables,
    )
    config = config_type(**values)
    check_config(config)
    return config


def explicit_values(
    config_type: type,
    *,
    section: str,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Mapping[str, Any]],
    known_variables: Iterable[str],
) -> dict[str, Any]:
    """Collect the fields that somebody set, by precedence, converted to their types.

    Args:
        section: Name of the service's table in the file.
        flags: Parsed arguments; keys that are no field are ignored.
        environ: The process environment. An empty variable counts as not set.
        file: A parsed TOML file (`read_config_file`), or {}.
        known_variables: COPPICE_* variables of other services and commands, which are no mistake.
    Raises: ConfigError.
    """
    specs = {spec.name: spec for spec in fields(config_type)}
    return {
        **_table_values(specs, file.get(section, {}), section),
        **_variable_values(specs, environ, known_variables),
        **_flag_values(specs, flags),
    }


def _table_values(
    specs: Mapping[str, Field[Any]], table: Mapping[str, Any], section: str
) -> dict[str, Any]:
    for key in table:
        if key not in specs:
            raise ConfigError(f"unknown key {key!r} in [{section}]{suggestion(key, specs)}")
    return {
        key: _from_toml(specs[key], value, f"{key} in [{section}]") for key, value in table.items()
    }


def _variable_values(
    specs: Mapping[str, Field[Any]], environ: Mapping[str, str], known_variables: Iterable[str]
) -> dict[str, Any]:
    own = {variable_name(name): spec for name, spec in specs.items()}
    known = {*own, *known_variables}
    values = {}
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and variable not in known:
            raise ConfigError(f"unknown variable {variable}{suggestion(variable, known)}")
        if variable in own and text != "":
            values[own[variable].name] = _from_text(own[variable], text, variable)
    return values


def _flag_values(specs: Mapping[str, Field[Any]], flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _from_text(specs[name], value, flag_name(name)) if isinstance(value, str) else value
        for name, value in flags.items()
        if name in specs
    }


def read_config_file(path: str | Path | None, sections: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse a TOML configuration file; None gives {}.

    Args:
        sections: Names of the tables that it may hold.
    Raises: ConfigError if it cannot be read or holds anything else.
    """
    if path is None:
        return {}
    try:
        with open(path, "rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    allowed = list(sections)
    for key, value in document.items():
        if key not in allowed:
            raise ConfigError(f"unknown table [{key}] in {path}{suggestion(key, allowed)}")
        if not isinstance(value, dict):
            raise ConfigError(f"{key} in {path} must be a table: write [{key}] above its keys")
    return document


def variable_name(field_name: str) -> str:
    """Return the environment variable of a field."""
    return ENV_PREFIX + field_name.upper()


def variables_of(config_types: Iterable[type]) -> set[str]:
    """Return the environment variables of all fields of several configurations."""
    return {variable_name(spec.name) for cls in config_types for spec in fields(cls)}


def to_arguments(config: Any) -> list[str]:
    """Return the flags that rebuild `config`; fields at their default are left out."""
    arguments = []
    for spec in fields(config):
        value = getattr(config, spec.name)
        if value == spec.default:
            continue
        if isinstance(value, bool):
            arguments.append(flag_name(spec.name) if value else flag_name("no_" + spec.name))
        else:
            arguments.append(f"{flag_name(spec.name)}={value}")
    return arguments


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?`, or a list of what is known when nothing is close."""
    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


def _from_text(spec: Field[Any], text: str, source: str) -> Any:
    default = spec.default
    if isinstance(default, bool):
        word = text.strip().lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            raise ConfigError(f"{source} is {text!r}, expected true or false")
        return word in TRUE_WORDS
    if isinstance(default, str):
        return normalize_choice(spec, text)
    kind = "a whole number" if isinstance(default, int) else "a number"
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        raise ConfigError(f"{source} is {text!r}, expected {kind}") from None


def _from_toml(spec: Field[Any], value: Any, source: str) -> Any:
    default = spec.default
    if isinstance(default, str) and isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return ",".join(value)
    elif isinstance(default, str) and isinstance(value, str):
        return normalize_choice(spec, value)
    elif isinstance(default, float) and type(value) in (int, float):
        return float(value)
    elif type(value) is type(default):
        return value
    raise ConfigError(f"{source} is {value!r}, expected a value like {default!r}")
