"""docs/security.md names a test for each statement, and all these tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"\| `(?:([\w/]+\.py)::)?(test_\w+)` \|$")


def test_all_tests_named_in_the_security_page_exist():
    statements = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.endswith("` |")]
    assert len(statements) > 20
    file = ""
    for statement in statements:
        named = NAMED.search(statement)
        assert named, statement
        file = named[1] or file  # "" for the file of the row above
        assert f"def {named[2]}(" in (ROOT / file).read_text(), f"{file}::{named[2]}"
