"""The command line: in this process, where nothing has to be imported again, or as a user runs it, in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from lipscope.cli.main import main

SURROUNDINGS = {"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What ``lipscope arguments`` prints and how it ends."""
    command, out, err = ["lipscope", *map(str, arguments)], io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, SURROUNDINGS),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def run_alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-c", "from lipscope.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | SURROUNDINGS)
