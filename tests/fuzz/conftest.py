from missing_packages import MISSING

if "hypothesis" not in MISSING:  # else the files in this folder, which import it, are skipped
    from fuzz_settings import pytest_terminal_summary  # noqa: F401
