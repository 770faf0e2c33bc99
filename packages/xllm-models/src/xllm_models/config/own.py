"""Parses the configuration keys that only one family has, so that `ModelConfig` has no field for them.

In config.json they are keys like the others. ModelArgs is a fixed set of names: there they are one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .keys import ConfigKeys

OWN_CONFIG = "own_config"


def parse_own(keys: ConfigKeys, own: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys of `own`, which holds their defaults; {} for a family without such keys.

    ModelArgs must have a value for each key, else ValueError: the host has lost them on the way.
    """
    if not own:
        return {}
    passed_on = keys.string(OWN_CONFIG, default="")
    try:
        values = json.loads(passed_on or "{}")
    except ValueError as error:
        raise ValueError(f"{OWN_CONFIG} in config must be a JSON object, got {passed_on!r}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{OWN_CONFIG} in config must be a JSON object, got {passed_on!r}")
    found = {name: values.get(name, keys.find(name)) for name in own}
    if keys.find("n_layers") is not None and (absent := [name for name, value in found.items() if value is None]):
        raise ValueError(f"config has n_layers, a name of ModelArgs, but no {OWN_CONFIG} with {', '.join(absent)}")
    return {name: own[name] if value is None else value for name, value in found.items()}
