"""What a run is about: the home folder, the source, its size and its seed. Read from the environment once.

A home remembers the settings it was made with, so that `make ui` needs no more than the home.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from models.artifact import write_json_atomically

PRESETS = ("tiny", "laptop")


@dataclass(frozen=True)
class Settings:
    """Where everything lives and what it is made of."""

    home: Path
    source: str
    preset: str
    seed: int
    data_dir: Path | None
    lake_url: str | None = None
    """Where the lake is, when it is not below the home: `s3://bucket/lake`."""
    artifacts_url: str | None = None
    """Where a copy of every artefact goes: `s3://bucket/artifacts`."""

    @property
    def lake(self) -> Path | str:
        """`<home>/lake`, or the URL of the lake."""
        return self.lake_url or self.home / "lake"

    def write(self) -> None:
        """Remember these settings in `<home>/settings.json`.

        Raises:
            ValueError: the home was made for another source or preset.
        """
        stored = _stored(self.home)
        made_for = (stored.get("source", self.source), stored.get("preset", self.preset))
        if made_for != (self.source, self.preset):
            raise ValueError(
                f"{self.home}: this home holds source {made_for[0]!r} with preset {made_for[1]!r}; "
                f"use another home (MIRACH_HOME) for {self.source!r} with preset {self.preset!r}"
            )
        values = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        del values["home"]
        write_json_atomically(self.home / "settings.json", values)


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `MIRACH_HOME`, `MIRACH_LAKE`, `MIRACH_ARTIFACTS`, `DATA`, `DATA_DIR`, `PRESET` and `SEED`.

    What is unset comes from the home.

    Raises:
        ValueError: names the variable and its value.
    """
    home = Path(environment.get("MIRACH_HOME") or Path("data") / (environment.get("DATA") or "simulator")).absolute()
    stored = _stored(home)
    preset = environment.get("PRESET") or str(stored.get("preset", "laptop"))
    if preset not in PRESETS:
        raise ValueError(f"PRESET: {preset!r} is unknown; known presets: {', '.join(PRESETS)}")
    seed = environment.get("SEED") or str(stored.get("seed", 0))
    if not seed.isdigit():
        raise ValueError(f"SEED: {seed!r} is not a whole number >= 0")
    data_dir = environment.get("DATA_DIR") or stored.get("data_dir")
    return Settings(
        home=home,
        source=environment.get("DATA") or str(stored.get("source", "simulator")),
        preset=preset,
        seed=int(seed),
        data_dir=Path(str(data_dir)).absolute() if data_dir else None,
        lake_url=_url(environment, stored, "MIRACH_LAKE", "lake_url"),
        artifacts_url=_url(environment, stored, "MIRACH_ARTIFACTS", "artifacts_url"),
    )


def _url(environment: Mapping[str, str], stored: Mapping[str, object], variable: str, key: str) -> str | None:
    value = environment.get(variable) or stored.get(key)
    if value is not None and "://" not in str(value):
        raise ValueError(f"{variable}: {value!r} is not a URL such as s3://bucket/prefix")
    return None if value is None else str(value).rstrip("/")


def _stored(home: Path) -> dict[str, object]:
    path = home / "settings.json"
    stored: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return stored
