"""Setting `strict`: what an engine with early exit would warn of ends it, as an error that says the same."""

import logging

from selfspec_cli.early_exit.errors import SettingsError

LOGGER = "vllm.selfspec"
"""Below vLLM's own logger; every warning of this package in an engine's processes goes through it."""
OF_CLIENTS = ("requests",)
"""Modules that warn of what one client sent, which never ends an engine."""


def _refuse(record: logging.LogRecord) -> bool:
    """A filter that raises SettingsError in place of a warning, but for what is of a client."""
    if record.levelno >= logging.WARNING and record.module not in OF_CLIENTS:
        raise SettingsError(f"strict = True, and early exit warns: {record.getMessage()}")
    return True


def set_strict(on: bool) -> None:
    """Of the engine that this process is about to make, or to be a worker of."""
    logger = logging.getLogger(LOGGER)
    if on == (_refuse in logger.filters):
        return
    (logger.addFilter if on else logger.removeFilter)(_refuse)
    # A filter sees no more than the level lets through, and VLLM_LOGGING_LEVEL may keep warnings out of the log.
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING) if on else logging.NOTSET)
