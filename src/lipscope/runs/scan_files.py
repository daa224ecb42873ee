"""A scan as files: the rows for other tools, and all that a report needs to say how they came about.

``rows.csv`` and ``rows.json`` hold the rows, ``fits.csv`` the growth of σ with n, ``run.json`` what was asked for, with
which command and versions, and ``tokens.json`` the worst places token by token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lipscope.runs.scan import Scan

RUN_FORMAT = 1


def write_scan(
    result: Scan,
    directory: str | os.PathLike[str],
    *,
    command: str | None = None,
    environment: Mapping[str, Any] | None = None,
) -> None:
    """Write a scan into a directory, which is made when it does not exist.

    Args:
        result: the scan.
        directory: where to.
        command: the command line that makes it again.
        environment: versions and hardware; see ``lipscope.runs.work``.
    """
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    (place / "rows.csv").write_text(result.csv_text(), encoding="utf-8")
    (place / "rows.json").write_text(result.to_json(), encoding="utf-8")
    run = {
        "format": RUN_FORMAT, "about": dict(result.about), "command": command,
        "environment": None if environment is None else dict(environment),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    (place / "run.json").write_text(json.dumps(run, indent=1), encoding="utf-8")
    views = [{"model": result.about.get("model"), "text": result.about.get("text"), **v.to_dict()} for v in result.views]
    (place / "tokens.json").write_text(json.dumps(views), encoding="utf-8")
    fits = place / "fits.csv"
    if len({row["n"] for row in result.rows}) < 3:
        # Of an earlier scan into the same directory.
        fits.unlink(missing_ok=True)
        return
    lines = ["layer,head,c,alpha,alpha_low,alpha_high,level,aic_power,aic_saturating,better"]
    for (layer, head), fit in result.fit().items():
        numbers = (fit.c, fit.alpha, fit.alpha_low, fit.alpha_high, fit.level, fit.aic_power, fit.aic_saturating)
        lines.append(",".join([str(layer), "" if head is None else str(head), *map(str, numbers), fit.better]))
    fits.write_text("\n".join(lines) + "\n", encoding="utf-8")
