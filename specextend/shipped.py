"""What comes with the package: configurations, the draft of the default pair, the documents of the demo.

In a wheel they lie in the package, in a checkout beside it. Needs the standard library alone, for shell completion.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent
_IS_CHECKOUT = not (_PACKAGE / "shipped").is_dir()
SHIPPED = _PACKAGE.parent if _IS_CHECKOUT else _PACKAGE / "shipped"
CONFIGS = SHIPPED / "configs"


def config_names() -> list[str]:
    """List the names of the shipped configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def find_config(config: str | Path) -> Path:
    """Return the file of a shipped configuration's name; anything else is a path already."""
    return CONFIGS / f"{config}.yaml" if str(config) in config_names() else Path(config)


def models_folder() -> Path:
    """Return the folder of models that were made or fetched: `.models` of a checkout, or in the user's cache."""
    if _IS_CHECKOUT:
        return SHIPPED / ".models"
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache", "specextend", "models")
