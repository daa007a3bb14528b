"""Environment variables that Ray reads when it is imported: set what the user has not. Imports nothing of Ray."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set for the driver of `ray job submit`."""


def is_submitted(environment: MutableMapping[str, str]) -> bool:
    """Whether this is the driver of `ray job submit`, whose current folder is a copy that goes away."""
    return SUBMITTED in environment


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Make a Ray of our own private: on loopback, with a token that nobody else knows, reporting nothing.

    Without `RAY_ADDRESS` the job starts such a Ray rather than join whatever was left running on this machine.
    """
    environment.setdefault("RAY_DEDUP_LOGS", "0")
    environment.setdefault("RAY_COLOR_PREFIX", "0")  # of the workers' lines; stderr would show the codes of colours
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ADDRESS", "local")
    if environment["RAY_ADDRESS"] != "local":
        return
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only, on Linux too, despite its name
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray would write one into the home folder
