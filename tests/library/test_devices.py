"""The batch on several devices: the tests of `on_devices.py`, in a process that has eight."""

import os
import subprocess
import sys

from tests.support.pages import ROOT


def test_on_eight_devices():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/library/on_devices.py"],
        env=os.environ | {"XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout + ran.stderr
