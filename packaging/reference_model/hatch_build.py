"""Where the model of a build is: in an unpacked sdist of this package next to this file, else in the checkout."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "selfspec_reference_model/model"


class Model(BuildHookInterface):
    """Takes the model into the sdist and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        own = Path(self.root, PLACE)
        model = own if own.is_dir() else Path(self.root).parents[1] / "experiments" / "reference_model" / "model"
        build_data["force_include"][str(model)] = PLACE
