"""Keys that one family has and `ModelConfig` does not know, in config.json and in ModelArgs.

In config.json they stand beside the others. ModelArgs, a fixed set of names, has them as JSON under one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .keys import ConfigKeys

OWN_CONFIG = "own_config"


def parse_own(keys: ConfigKeys, own: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys `own`, which has those of absent keys; {} for a family without.

    ModelArgs without a value for each, which a host has that does not pass on what it was told, are a ValueError.
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
