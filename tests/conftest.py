import os
import shutil

# Some virtual machines claim bfloat16 instructions that they do not have; Muon's step would die on them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Tests write thousands of small files, each of which waits for the disk. Where there is enough memory they go there.
MEMORY, ENOUGH = "/dev/shm", 8 * 2**30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

import pytest
import torch

torch.set_num_threads(1)  # one test worker per core; more threads than that only get in each other's way


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """CI installs everything first, so there a skipped test is a failed one."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("COMPLETEP_NO_SKIP") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and CI lets nothing be skipped: {report.longrepr}"
